"""A service that drafts for scorers."""
