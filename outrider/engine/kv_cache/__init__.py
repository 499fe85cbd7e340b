"""The KV cache: its block pool, its tensors, and hidden states in the same pages."""
