"""Drafts of vLLM's steps that are scheduled before the one before has ended."""
