"""Small models and tokenizers, and what runs them on a CPU or a device."""
