"""Kernels of a Llama step on a CPU, compiled by Numba and run by torch's threads."""
