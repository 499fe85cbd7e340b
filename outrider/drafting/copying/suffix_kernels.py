"""Compiled search for the places of a text that end as a context does, and their continuations.

For each n-gram length in `ORDERS` a table of hashed n-grams leads to the latest place that one
ends before, and from each place a link leads to the one before, as in LZ77's hash chains. So a
token costs a fixed number of words, nothing is ever deleted (old places are merely out of range),
and the counts of a suffix tree are counts over the `RECENT` latest places of a context.

Places are numbered without end. The last tokens and links are kept, as many as there is room for,
which is a power of two: those of a place are at the place modulo the room.

All kernels are in this one file: Numba notices a changed file, not a changed callee elsewhere.
"""

# mypy: disable-error-code="untyped-decorator, index, arg-type, operator"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.cpu.compiled import compiled

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

ORDERS = 4  # n-grams of 1, 2, 4 and 8 tokens
END = -1  # of a document; no token
RECENT = 64  # places that a context is looked for at, per n-gram length
_VISITED = 256  # links that are followed for them at most


class Text(NamedTuple):
    """The tokens at places `start` to `end`, with their links."""

    tokens: Ints  # [room]
    links: Ints  # [ORDERS, room]; -1: none
    heads: Ints  # [ORDERS, table]; -1: none
    start: int
    end: int


@compiled
def _mixed(key: int, token: int) -> Any:
    return (np.uint64(key) ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)


@compiled
def _slot(key: int, size: int) -> Any:
    """Return a place in a table; `size` is a power of two."""
    return np.int64((np.uint64(key) >> np.uint64(32)) & np.uint64(size - 1))


@compiled
def enter(text: Text, fresh: Ints) -> None:
    """Enter `fresh` after the text, each token after the n-grams that end before it."""
    tokens, links, heads = text.tokens, text.links, text.heads
    mask = len(tokens) - 1
    for i in range(len(fresh)):
        place = text.end + i
        tokens[place & mask] = fresh[i]
        key = np.uint64(0)
        order, size = 0, 1
        if fresh[i] != END:
            for back in range(1, min(1 << (ORDERS - 1), place - text.start) + 1):
                token = tokens[(place - back) & mask]
                if token == END:
                    break
                key = _mixed(key, token)
                if back == size:
                    slot = _slot(key, heads.shape[1])
                    links[order, place & mask] = heads[order, slot]
                    heads[order, slot] = place
                    order += 1
                    size *= 2
        while order < ORDERS:
            links[order, place & mask] = -1
            order += 1


@compiled
def _places(text: Text, context: Ints, order: int, places: Ints, lengths: Ints) -> int:
    """Find the latest places after the end of `context`, and the number of matching tokens.

    At least 2^order match. places, lengths [RECENT]; returns the number of places.
    """
    tokens, known, size = text.tokens, len(context), 1 << order
    if known < size:
        return 0
    key, mask = np.uint64(0), len(tokens) - 1
    for back in range(1, size + 1):
        key = _mixed(key, context[known - back])
    place = text.heads[order, _slot(key, text.heads.shape[1])]
    found = visited = 0
    while place > text.start and found < RECENT and visited < _VISITED:
        visited += 1
        length, last = 0, place - 1
        most = min(known, place - text.start)
        while length < most and tokens[(last - length) & mask] == context[known - 1 - length]:
            length += 1
        if length >= size:
            places[found], lengths[found] = place, length
            found += 1
        place = text.links[order, place & mask]
    return found


@compiled
def _next(text: Text, place: int, tail: Ints) -> int:
    """Return the token at `place`; beyond the end of the text `tail` goes on."""
    if place < text.end:
        return int(text.tokens[place & (len(text.tokens) - 1)])
    return int(tail[place - text.end]) if place - text.end < len(tail) else END


@compiled
def best_draft(
    text: Text,
    context: Ints,
    path: Ints,
    own: bool,
    factor: float,
    min_prob: float,
    draft: Ints,
    odds: Floats,
) -> tuple[float, int]:
    """Write the best-scored continuation of `context` to draft [wanted]; return score and length.

    SuffixDecoding (Oliaro et al., arXiv 2411.04975): of all matches of m tokens the likeliest
    next token is followed, `factor` * m times at most, as long as the product of the tokens'
    frequencies is at least `min_prob`; the sum of these products is the score. The m of the best
    score wins, the longer one among equals. `own`: the text is the context's own, which ends with
    `path` after it. To odds [wanted] goes what speaks for each token: matches that go on with it
    by those that do not, times the length of the match with the tokens before it.
    """
    places = np.empty(RECENT, np.int32)
    lengths = np.empty(RECENT, np.int32)
    active = np.empty(RECENT, np.int32)
    wanted = len(draft)
    # The context's own text goes on with the path, and then with the draft itself.
    tail = np.empty(len(path) + wanted if own else 0, np.int32)
    if own:
        tail[: len(path)] = path
    candidate, evidence = np.empty(wanted, np.int32), np.empty(wanted, np.float64)
    best, best_length = 0.0, 0
    longest = len(context) + 1
    for order in range(ORDERS - 1, -1, -1):
        found = _places(text, context, order, places, lengths)
        for match in range(longest - 1, (1 << order) - 1, -1):
            limit = min(wanted, int(match * factor + 1e-6))
            if limit <= best:
                break  # nor do shorter ones score more
            num_active, new = 0, False
            for i in range(found):
                if lengths[i] >= match:
                    new |= lengths[i] == match
                    active[num_active] = places[i]
                    num_active += 1
            if not new:
                continue  # the same places as for a longer match
            score, prob, length = 0.0, 1.0, 0
            while length < limit:
                likeliest, most = END, 0
                for i in range(num_active):
                    token = _next(text, active[i] + length, tail)
                    if token == END or token == likeliest:  # noqa: SIM109 -- Numba has no sets
                        continue
                    count = 0
                    for j in range(num_active):
                        count += _next(text, active[j] + length, tail) == token
                    if count > most:
                        likeliest, most = token, count
                    if 2 * most >= num_active:
                        break
                if likeliest == END or prob * most / num_active < min_prob:
                    break
                prob *= most / num_active
                score += prob
                others = num_active - most
                evidence[length] = (match + length) * (most + 0.5) / (others + 0.5)
                kept = 0
                for i in range(num_active):
                    if _next(text, active[i] + length, tail) == likeliest:
                        active[kept] = active[i]
                        kept += 1
                num_active = kept
                if own:
                    tail[len(path) + length] = likeliest
                candidate[length] = likeliest
                length += 1
            if score > best:
                best, best_length = score, length
                draft[:length] = candidate[:length]
                odds[:length] = evidence[:length]
        longest = min(longest, 1 << order)
    return best, best_length


@compiled
def next_tokens(text: Text, context: Ints, tail: Ints, found_tokens: Ints) -> int:
    """Write different tokens that followed matches of `context` to found_tokens [n].

    Longer and later matches come first; `tail` continues the text. Returns the number of tokens.
    """
    places = np.empty(RECENT, np.int32)
    lengths = np.empty(RECENT, np.int32)
    count = 0
    for order in range(ORDERS - 1, -1, -1):
        found = _places(text, context, order, places, lengths)
        for i in range(found):
            token = _next(text, places[i], tail)
            known = token == END
            for j in range(count):
                known |= found_tokens[j] == token
            if not known:
                found_tokens[count] = token
                count += 1
                if count == len(found_tokens):
                    return count
    return count
