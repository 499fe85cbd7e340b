"""Builds drafting methods, as a command line describes them."""
