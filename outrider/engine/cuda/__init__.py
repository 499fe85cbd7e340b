"""Code for CUDA devices, imported only there, because it needs `triton`."""
