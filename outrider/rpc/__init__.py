"""Codecs, channels, TLS and telemetry that the services share."""
