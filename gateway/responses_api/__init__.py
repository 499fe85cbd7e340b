"""OpenAI's Responses API: each request is answered as a chat."""
