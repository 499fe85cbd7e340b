"""Decide how many tokens to verify, and how long to wait for drafts."""
