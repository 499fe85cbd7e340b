"""Proposer methods: ways to guess a session's next tokens. Knows no wire."""
