"""Scorers: which one takes a request, and what it adds, over its stream or another's."""
