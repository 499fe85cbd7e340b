"""OpenAI's HTTP API.

A new parameter is a field in requests.py. If parse.py refuses it so far, take it out of `_NEUTRAL`.
"""
