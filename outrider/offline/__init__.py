"""Outrider as a library: a model, its drafts and the gateway's pipeline in one process."""
