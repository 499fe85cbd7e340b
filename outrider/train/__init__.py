"""Training of draft methods for a given target. Torch; started as `python -m outrider.train`."""
