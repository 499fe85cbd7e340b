"""The proposers of a scorer's sessions, and the transport to them."""
