"""Draft modules that read the target's hidden states."""
