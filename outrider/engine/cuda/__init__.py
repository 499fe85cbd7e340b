"""What runs only on a CUDA device. Imported only there: needs `triton`, which torch brings."""
