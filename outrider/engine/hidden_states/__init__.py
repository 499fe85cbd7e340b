"""Capture hidden states of the target and stream them to proposers."""
