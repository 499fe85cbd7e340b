"""Draft with a small language model."""
