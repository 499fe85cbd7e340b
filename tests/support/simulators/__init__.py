"""Engines and proposers on a simulated clock."""
