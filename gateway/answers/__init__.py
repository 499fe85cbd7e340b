"""Answers of chat models as text, reasoning and tool calls.

A parser is an automaton over characters: what it finds does not depend on how the text was cut.
"""
