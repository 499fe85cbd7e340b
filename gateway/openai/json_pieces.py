"""JSON of an answer of any size, made so that other threads have their turns meanwhile."""

from __future__ import annotations

import json
from typing import Any, Final

_DEPTH: Final = 7
"""Levels that are taken apart: a token's logprobs in a response lie that deep."""
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_pieces(value: Any) -> list[str]:
    """Return JSON in pieces, of which each holds a token's logprobs at most, or a flat list.

    The encoder is one call in C, in which no other thread runs: a second for a large answer.
    """
    pieces: list[str] = []
    _add(pieces, value, _DEPTH)
    return pieces


def _add(pieces: list[str], value: Any, depth: int) -> None:
    before = ""
    if depth and isinstance(value, dict):
        pieces.append("{")
        for key, each in value.items():
            pieces.append(f"{before}{_encode(key)}:")
            _add(pieces, each, depth - 1)
            before = ","
        pieces.append("}")
    elif depth and isinstance(value, list) and value and isinstance(value[-1], dict):
        pieces.append("[")
        for each in value:
            pieces.append(before)
            _add(pieces, each, depth - 1)
            before = ","
        pieces.append("]")
    else:
        pieces.append(_encode(value))
