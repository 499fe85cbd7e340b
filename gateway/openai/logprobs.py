"""Log probabilities as OpenAI's two APIs shape them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gateway.output import OutputToken
from outrider.params import TokenIds
from outrider.types import TokenLogprobs

Spell = Callable[[int], bytes]  # a token's bytes

FIRST: Final = TokenLogprobs(0.0, ())
"""Stands for the logprobs of a prompt's first token, which nothing precedes."""
_LEAST = -9999.0  # JSON has no minus infinity


def chat_logprobs(tokens: Sequence[OutputToken], spell: Spell) -> dict[str, Any]:
    """`choice.logprobs` of a chat completion."""
    content = []
    for token in tokens:
        assert token.logprobs is not None, "asked for with every token"
        content.append(
            {
                **_entry(token.id, token.logprobs.logprob, spell),
                "top_logprobs": [_entry(*top, spell) for top in token.logprobs.top],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[OutputToken], spell: Spell, offset: int = 0
) -> dict[str, Any]:
    """`choice.logprobs` of a completion. `offset`: characters of the text before these tokens.

    `top_logprobs` hold the token itself besides the likeliest, if it is not one of them.
    """
    entries = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
    offsets = []
    for token, _ in entries:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [_text(spell(token.id)) for token, _ in entries],
        "token_logprobs": [
            None if logprobs is FIRST else _finite(logprobs.logprob) for _, logprobs in entries
        ],
        "top_logprobs": [
            None
            if logprobs is FIRST
            else _by_text([*logprobs.top, (token.id, logprobs.logprob)], spell)
            for token, logprobs in entries
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(
    token_ids: TokenIds, scores: Sequence[TokenLogprobs], top: int, spell: Spell
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token itself and the `top` likeliest, by id."""
    told: list[dict[str, Any] | None] = [None]
    for own, each in zip(token_ids[1:], scores, strict=True):
        ranked = {token: (rank, logprob) for rank, (token, logprob) in enumerate(each.top[:top], 1)}
        entries = {own: ranked.get(own, (None, each.logprob)), **ranked}
        told.append(
            {
                str(token): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": _text(spell(token)),
                }
                for token, (rank, logprob) in entries.items()
            }
        )
    return told


def mean_logprob(tokens: Sequence[OutputToken]) -> float:
    """Log probability per token, the measure of `best_of`; of no token, minus infinity."""
    known = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(known) / len(known) if known else float("-inf")


def _entry(token_id: int, logprob: float, spell: Spell) -> dict[str, Any]:
    spelled = spell(token_id)
    return {"token": _text(spelled), "logprob": _finite(logprob), "bytes": list(spelled)}


def _by_text(tokens: Iterable[tuple[int, float]], spell: Spell) -> dict[str, float]:
    """Keep the likeliest of the tokens with the same text."""
    found: dict[str, float] = {}
    for token_id, logprob in tokens:
        found.setdefault(_text(spell(token_id)), _finite(logprob))
    return found


def _text(spelled: bytes) -> str:
    """Return a token's text; a part of a character is spelled like OpenAI's, in hex."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
