"""Benchmarks: each prints a table and JSON."""
