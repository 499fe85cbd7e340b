"""Find a model, its tokenizer and its chat template."""
