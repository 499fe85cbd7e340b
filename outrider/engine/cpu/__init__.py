"""The step of a Llama on CPU: kernels compiled by Numba, run by torch's own threads."""
