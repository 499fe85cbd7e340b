"""The inputs of llguidance: tokenizers, grammars in its own format, and limits."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import Future
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.engine.sampling.json_schema import ESCAPES, without_dead_ends
from outrider.errors import ConfigError
from outrider.params import Constraint, ConstraintKind

_WHITESPACE = r" |\r?\n[ \t]{0,32}"
"""White space that JSON may have between tokens; without a bound some models never end."""
_JSON_OPTIONS = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": ESCAPES}
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
_SCHEMA = re.compile(rf"(?P<schema>%json\s*(?=\{{))|{_LITERAL.pattern}")
_INTERSECTION = re.compile(r"&|~(?!\s*\d)")
"""Intersection of terminals by `&`, or exclusion by `~`. (`x ~ 3` repeats x.)"""

_STACK_BYTES = 2**28  # reserved; used by a constraint with a chain of thousands of references
_stack_size_lock = threading.Lock()


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


def new_matcher(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """Compile a constraint; the matcher says what it cannot compile. Raises `ValueError`.

    llguidance follows references (a schema's $refs, a grammar's rules) by recursion. A long chain
    of them would overflow the stack of the calling thread, and end the process.
    """
    compiled: Future[LLMatcher] = Future()

    def compile_here() -> None:
        try:
            grammar, bounds = _grammar_of(constraint), _limits(constraint.kind)
            compiled.set_result(LLMatcher(tokenizer, grammar, log_level=0, limits=bounds))
        except Exception as error:
            compiled.set_exception(error)

    with _stack_size_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=compile_here, name="constraint", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return compiled.result()


def _grammar_of(constraint: Constraint) -> str:
    """Translate a constraint to llguidance's own format. Raises `ValueError`."""
    source = mended(constraint)
    if constraint.kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(source)
    if constraint.kind is ConstraintKind.GRAMMAR:
        return LLMatcher.grammar_from_lark(source)
    return LLMatcher.grammar_from_json_schema(source, defaults=_JSON_OPTIONS)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def mended(constraint: Constraint) -> str:
    """Return a constraint's source without what llguidance would get stuck in.

    That of a JSON object is a schema. Takes up to seconds if it is new. Raises `ValueError` for a
    source that has no such form.
    """
    if constraint.kind is ConstraintKind.REGEX:
        return constraint.source
    if constraint.kind is ConstraintKind.GRAMMAR:
        # No limit bounds the search for a text in an intersection.
        if _INTERSECTION.search(_LITERAL.sub("", constraint.source)):
            raise ValueError("terminals with & or ~ are not supported, write what they may be")
        return _with_mended_schemas(constraint.source)
    anything = constraint.kind is ConstraintKind.JSON_OBJECT
    return _mended_schema('{"type": "object"}' if anything else constraint.source)


def _mended_schema(source: str) -> str:
    mended = without_dead_ends(source)
    try:
        schema = json.loads(mended)
    except (json.JSONDecodeError, RecursionError):
        return mended  # llguidance refuses it
    given = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if isinstance(given, dict):
        schema["x-guidance"] = {**_JSON_OPTIONS, **given}
    return json.dumps(schema)


def _with_mended_schemas(source: str) -> str:
    """Give the JSON schemas in a Lark grammar the form that they have as constraints themselves.

    Raises `ValueError` for a schema that has none.
    """
    parts, at, json_text = [], 0, json.JSONDecoder()
    while found := _SCHEMA.search(source, at):
        if found["schema"] is None:
            parts.append(source[at : found.end()])
            at = found.end()
            continue
        schema, end = json_text.raw_decode(source, found.end())
        parts += [source[at : found.end()], _mended_schema(json.dumps(schema))]
        at = end
    return "".join([*parts, source[at:]])


def _limits(kind: ConstraintKind) -> LLParserLimits:
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
