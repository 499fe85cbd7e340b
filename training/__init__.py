"""How the embedded pair of models (a small target and its draft) was made."""
