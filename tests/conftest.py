"""Settings for every test."""

from hypothesis import settings

# A deadline per example would measure the machine's load: pytest-timeout bounds each test.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")
