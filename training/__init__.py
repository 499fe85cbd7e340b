"""Training of the embedded pair of models, a small target and its draft."""
