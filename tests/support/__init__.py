"""Fakes, small models and simulators for tests."""
