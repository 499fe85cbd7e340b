"""Draft with modules that read the target's hidden states."""
