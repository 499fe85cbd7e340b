"""Draft loops, captured as CUDA graphs or run eagerly."""
