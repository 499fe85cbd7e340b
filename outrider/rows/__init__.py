"""The rows that an engine decodes: the drafts at hand, what is awaited, and their accounts."""
