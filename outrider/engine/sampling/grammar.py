"""The inputs of llguidance: tokenizers, grammars in its own format, and limits."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.errors import ConfigError
from outrider.params import Constraint, ConstraintKind

_WHITESPACE = r" |\r?\n[ \t]{0,32}"
"""White space that JSON may have between tokens; without a bound some models never end."""
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
_INTERSECTION = re.compile(r"&|~(?!\s*\d)")
"""Intersection of terminals by `&`, or exclusion by `~`. (`x ~ 3` repeats x.)"""


def load_tokenizer(tokenizer_json: str, vocab_size: int) -> LLTokenizer:
    """Return the tokenizer for a model of `vocab_size` tokens. Raises `ConfigError`."""
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size)
    except ValueError:
        pass  # the tokenizer has more tokens than the model, or another fault
    try:
        return LLTokenizer(tokenizer_json)
    except ValueError as error:
        raise ConfigError(f"llguidance cannot read this tokenizer: {error}") from error


def grammar_of(constraint: Constraint) -> str:
    """Translate a constraint to llguidance's own format. Raises `ValueError`."""
    source = constraint.source
    if constraint.kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(source)
    if constraint.kind is ConstraintKind.GRAMMAR:
        # No limit bounds the search for a text in an intersection.
        if _INTERSECTION.search(_LITERAL.sub("", source)):
            raise ValueError("terminals with & or ~ are not supported, write what they may be")
        return LLMatcher.grammar_from_lark(source)
    schema = '{"type": "object"}' if constraint.kind is ConstraintKind.JSON_OBJECT else source
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})


def limits(kind: ConstraintKind) -> LLParserLimits:
    """Bound a compilation to seconds, a mask to milliseconds and a cache to some 100 MB.

    Items are the ways to read the text so far. Only those of a grammar can grow without end.
    """
    grammar = kind is ConstraintKind.GRAMMAR
    return LLParserLimits(
        max_lexer_states=50_000,
        step_max_items=5_000 if grammar else None,
        max_items_in_row=500 if grammar else None,
        verbose_errors=False,
    )
