"""Draft loops captured as CUDA graphs."""
