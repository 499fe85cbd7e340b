"""The door for clients: OpenAI over HTTP, and gRPC."""
