"""Draft loops compiled for CPUs."""
