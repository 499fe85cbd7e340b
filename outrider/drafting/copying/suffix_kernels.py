"""Finding the places of a text that end as a context does, and what they are followed by: compiled.

For each n-gram length in `ORDERS` a table of hashed n-grams leads to the latest place that one
ends before, and from each place a link leads to the one before, as in LZ77's hash chains. So a
token costs a fixed number of words, nothing is ever deleted (old places are merely out of range),
and what a suffix tree counts is counted over the `RECENT` latest places of a context.

Places are numbered without end; of tokens and links the last ones are kept, as many as there is
room for, which is a power of two: that of a place is at the place modulo the room.

All kernels are in this one file: Numba notices a changed file, not a changed callee elsewhere.
"""

# mypy: disable-error-code="untyped-decorator, index, arg-type, operator"

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.cpu.compiled import compiled

Ints = NDArray[np.int32]

ORDERS = 4  # n-grams of 1, 2, 4 and 8 tokens
END = -1  # of a document; no token
RECENT = 64  # places that a context is looked for at, per n-gram length
_VISITED = 256  # links that are followed for them at most


@compiled
def _mixed(key: int, token: int) -> Any:
    return (np.uint64(key) ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)


@compiled
def _slot(key: int, size: int) -> Any:
    """A place in a table; `size` is a power of two."""
    return np.int64((np.uint64(key) >> np.uint64(32)) & np.uint64(size - 1))


@compiled
def enter(fresh: Ints, tokens: Ints, links: Ints, heads: Ints, start: int, end: int) -> None:
    """Enters `fresh` after tokens[start:end], each after the n-grams that end before it.

    tokens [room], links [ORDERS, room], heads [ORDERS, table]; -1: none.
    """
    mask = len(tokens) - 1
    for i in range(len(fresh)):
        place = end + i
        tokens[place & mask] = fresh[i]
        key = np.uint64(0)
        order, size = 0, 1
        if fresh[i] != END:
            for back in range(1, min(1 << (ORDERS - 1), place - start) + 1):
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
def _places(
    tokens: Ints,
    links: Ints,
    heads: Ints,
    start: int,
    context: Ints,
    order: int,
    places: Ints,
    lengths: Ints,
) -> int:
    """The latest places after what `context` ends with, and how many tokens match there.

    At least 2^order match. places, lengths [RECENT]; returns how many were found.
    """
    known = len(context)
    size = 1 << order
    if known < size:
        return 0
    key, mask = np.uint64(0), len(tokens) - 1
    for back in range(1, size + 1):
        key = _mixed(key, context[known - back])
    place = heads[order, _slot(key, heads.shape[1])]
    found = visited = 0
    while place > start and found < RECENT and visited < _VISITED:
        visited += 1
        length, last = 0, place - 1
        most = min(known, place - start)
        while length < most and tokens[(last - length) & mask] == context[known - 1 - length]:
            length += 1
        if length >= size:
            places[found], lengths[found] = place, length
            found += 1
        place = links[order, place & mask]
    return found


@compiled
def _next(tokens: Ints, end: int, place: int, tail: Ints) -> int:
    """The token at `place`; beyond the end of the text `tail` goes on."""
    if place < end:
        return int(tokens[place & (len(tokens) - 1)])
    return int(tail[place - end]) if place - end < len(tail) else END


@compiled
def best_draft(
    tokens: Ints,
    links: Ints,
    heads: Ints,
    start: int,
    end: int,
    context: Ints,
    path: Ints,
    own: bool,
    wanted: int,
    factor: float,
    min_prob: float,
    draft: Ints,
) -> tuple[float, int]:
    """The best-scored continuation of `context` in tokens[start:end]; its score and length.

    SuffixDecoding (Oliaro et al., arXiv 2411.04975): of all matches of m tokens the likeliest
    next token is followed, `factor` * m times at most, as long as the product of the tokens'
    frequencies is at least `min_prob`; the sum of these products is the score. The m of the best
    score wins, the longer one among equals. `own`: the text is the context's own, which ends with
    `path` after it. draft [wanted] gets the tokens.
    """
    places = np.empty(RECENT, np.int32)
    lengths = np.empty(RECENT, np.int32)
    active = np.empty(RECENT, np.int32)
    # What follows the end of the context's own text: the path, and then the draft itself.
    tail = np.empty(len(path) + wanted if own else 0, np.int32)
    if own:
        tail[: len(path)] = path
    candidate = np.empty(wanted, np.int32)
    best, best_length = 0.0, 0
    longest = len(context) + 1
    for order in range(ORDERS - 1, -1, -1):
        found = _places(tokens, links, heads, start, context, order, places, lengths)
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
                    token = _next(tokens, end, active[i] + length, tail)
                    if token == END or token == likeliest:  # noqa: SIM109 -- Numba has no sets
                        continue
                    count = 0
                    for j in range(num_active):
                        count += _next(tokens, end, active[j] + length, tail) == token
                    if count > most:
                        likeliest, most = token, count
                    if 2 * most >= num_active:
                        break
                if likeliest == END or prob * most / num_active < min_prob:
                    break
                prob *= most / num_active
                score += prob
                kept = 0
                for i in range(num_active):
                    if _next(tokens, end, active[i] + length, tail) == likeliest:
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
        longest = min(longest, 1 << order)
    return best, best_length


@compiled
def next_tokens(
    tokens: Ints,
    links: Ints,
    heads: Ints,
    start: int,
    end: int,
    context: Ints,
    path: Ints,
    own: bool,
    found_tokens: Ints,
) -> int:
    """Different tokens that followed matches of `context`, longer and later matches first.

    As many as found_tokens [n] takes; returns how many there are.
    """
    places = np.empty(RECENT, np.int32)
    lengths = np.empty(RECENT, np.int32)
    tail = path if own else path[:0]
    count = 0
    for order in range(ORDERS - 1, -1, -1):
        found = _places(tokens, links, heads, start, context, order, places, lengths)
        for i in range(found):
            token = _next(tokens, end, places[i], tail)
            known = token == END
            for j in range(count):
                known |= found_tokens[j] == token
            if not known:
                found_tokens[count] = token
                count += 1
                if count == len(found_tokens):
                    return count
    return count
