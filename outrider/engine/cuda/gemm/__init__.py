"""Matrix products of few rows on CUDA, and how one is chosen."""
