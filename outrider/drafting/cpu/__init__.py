"""A Llama draft loop compiled for CPUs."""
