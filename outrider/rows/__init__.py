"""The rows that an engine decodes: the draft at hand, the draft awaited, and counts of both."""
