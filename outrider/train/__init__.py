"""Train draft methods for a given target: `python -m outrider.train`."""
