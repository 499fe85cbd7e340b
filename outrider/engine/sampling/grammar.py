"""What llguidance is given: tokenizers, grammars in its own format, and limits."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.errors import ConfigError
from outrider.params import Constraint, ConstraintKind

_WHITESPACE = r" |\r?\n[ \t]{0,32}"
"""Between JSON's tokens, beside none. A model that prefers blanks would never come to an end."""
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
_INTERSECTION = re.compile(r"&|~(?!\s*\d)")
"""Of terminals, by `&` or of what `~` excludes. (`x ~ 3` repeats x.)"""


def load_tokenizer(tokenizer_json: str, vocab_size: int) -> LLTokenizer:
    """For a model of so many tokens. Raises `ConfigError`."""
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size)
    except ValueError:
        pass  # it has more tokens than the model, or something else is wrong with it
    try:
        return LLTokenizer(tokenizer_json)
    except ValueError as error:
        raise ConfigError(f"llguidance cannot read this tokenizer: {error}") from error


def grammar_of(constraint: Constraint) -> str:
    """In llguidance's own format. Raises `ValueError`."""
    source = constraint.source
    if constraint.kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(source)
    if constraint.kind is ConstraintKind.GRAMMAR:
        # Whether anything is in an intersection may take for ever to find out: no limit bounds it.
        if _INTERSECTION.search(_LITERAL.sub("", source)):
            raise ValueError("terminals with & or ~ are not supported, write what they may be")
        return LLMatcher.grammar_from_lark(source)
    schema = '{"type": "object"}' if constraint.kind is ConstraintKind.JSON_OBJECT else source
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})


def limits(kind: ConstraintKind) -> LLParserLimits:
    """What bounds a compilation to seconds, a mask to milliseconds and a cache to some 100 MB.

    Items are the ways to read the text so far. A grammar can have ever more of them, and is refused
    where they are many; a schema of 400 optional fields has 1,600, and no more later.
    """
    if kind is ConstraintKind.GRAMMAR:
        return LLParserLimits(
            max_lexer_states=50_000,
            step_max_items=5_000,
            max_items_in_row=500,
            verbose_errors=False,
        )
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
