"""Keep the target's hidden states in vLLM, and send them to proposers."""
