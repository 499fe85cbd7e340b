"""Pages of the KV cache: their pool, their tensors, hidden states kept beside them."""
