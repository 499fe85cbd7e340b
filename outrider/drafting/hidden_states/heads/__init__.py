"""The draft modules ("heads") themselves, and the checkpoint formats that they come in."""
