"""Who drafts for which session, and the transport to them."""
