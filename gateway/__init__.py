"""The service that clients call: OpenAI's and Anthropic's HTTP APIs, and gRPC."""
