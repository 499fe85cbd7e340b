"""What the services share of the wire: codecs, channels, TLS, telemetry."""
