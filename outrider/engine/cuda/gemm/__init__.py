"""Matrix products of few rows on CUDA, and the choice of their kernels."""
