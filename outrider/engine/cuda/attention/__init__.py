"""Paged attention on CUDA: what launches it. Our kernel is in ../kernels/attention.py."""
