"""CUDA graphs of steps: staging buffers, capture, decode, prefill."""
