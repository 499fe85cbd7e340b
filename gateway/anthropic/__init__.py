"""Anthropic's Messages API: each request is answered as a chat."""
