"""Draft ahead: continuations for the outcomes of a running verification."""
