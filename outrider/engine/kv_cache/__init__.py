"""The KV cache: block pool, tensors, hidden states. ../model/memory_budget.py decides its size."""
