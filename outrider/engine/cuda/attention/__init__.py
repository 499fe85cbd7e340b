"""Paged attention on CUDA."""
