"""A service that verifies drafts over a paged KV cache."""
