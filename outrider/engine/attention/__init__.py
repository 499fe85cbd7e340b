"""Attention over paged rows: the protocol, groups of rows, and plain torch."""
