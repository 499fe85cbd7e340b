"""OpenAI's Responses API, as chats."""
