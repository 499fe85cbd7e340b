"""Outrider: speculative decoding for large language models as a distributed service."""

__version__ = "0.1.0"
