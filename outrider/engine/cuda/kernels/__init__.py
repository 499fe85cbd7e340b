"""Triton kernels. Nothing here allocates, synchronises or looks at values on the host."""
