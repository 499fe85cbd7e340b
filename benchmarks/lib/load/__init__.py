"""Send requests over HTTP, at a rate or a number at a time, and time their streams."""
