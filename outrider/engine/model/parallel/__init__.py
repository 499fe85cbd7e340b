"""Run one model over several GPUs of one host."""
