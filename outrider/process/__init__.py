"""Processes: their children, signals and folder of temporary files, and whether they hang."""
