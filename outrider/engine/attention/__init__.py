"""Attention over paged rows: protocol, backends, masks, shared prefixes."""
