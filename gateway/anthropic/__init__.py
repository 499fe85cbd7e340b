"""Anthropic's Messages API, as chats."""
