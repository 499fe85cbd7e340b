"""Drafting methods: ways to guess a session's next tokens, without any RPC.

A method implements `Proposer` (proposer.py); `SessionMethod` (sessions.py) keeps its table of
sessions. `copying/ngram.py` is the smallest example. To add a method, name it in
`outrider/methods.py` (also among the copying ones if it copies), give it a config whose fields
become flags (`CONFIGS` in building/config.py), and a builder (`_BUILDERS` in building/methods.py).
"""
