"""OpenAI's HTTP API.

A new parameter is a field in requests.py. If other_fields.py has it, take it out there.
CONTRIBUTING.md names what else it passes through.
"""
