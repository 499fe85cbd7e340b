"""Estimate the acceptance of draft tokens, by their depth and by row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from outrider.bounded import remember
from outrider.params import MAX_SPECULATIVE_TOKENS
from outrider.policy.row import Drafting
from outrider.rounds import Round

PRIOR_RATE = 0.8  # accepted of an unknown proposer's tokens: it is worth a try
PRIOR_TOKENS = 8.0  # of a row or a depth that say as much of it as all that is known besides
PROPOSER_FADE = 0.99  # kept per round of what a proposer's drafts met
BINS = 16  # of confidences, of which a byte tells 256: the rest is noise


class _Kind:
    """Drafts of one method of one proposer, for rows that are sampled or for those that are not."""

    def __init__(self) -> None:
        self.confident = False  # its last draft told how sure it is
        self._counts = np.zeros((2, MAX_SPECULATIVE_TOKENS, BINS))  # accepted, tried
        self._learn()

    def observe(self, rounds: list[tuple[Round, bytes]]) -> None:
        """Take in rounds and the confidences of their drafts, if these told any."""
        self._counts *= PROPOSER_FADE ** len(rounds)
        told = np.zeros((len(rounds), MAX_SPECULATIVE_TOKENS), np.uint8)
        for row, (_, confidences) in zip(told, rounds, strict=True):
            row[: len(confidences)] = np.frombuffer(confidences, np.uint8)
        self.confident = bool(told[-1, 0])
        ends = np.array([(round_.accepted, round_.tried) for round_, _ in rounds])
        for counts, end in zip(self._counts, ends.T, strict=True):
            row, depth = (end[:, None] > np.arange(MAX_SPECULATIVE_TOKENS)).nonzero()
            np.add.at(counts, (depth, told[row, depth] // (256 // BINS)), 1.0)
        self._learn()

    def _learn(self) -> None:
        accepted, tried = self._counts.sum((1, 2)).tolist()
        self.rate: float = (accepted + PRIOR_TOKENS * PRIOR_RATE) / (tried + PRIOR_TOKENS)
        by_depth = _shrunk(self._counts.sum(2), self.rate)
        self.odds = by_depth / (1.0 - by_depth)  # [depths]
        # A liar's confidences say nothing, and so all of them come to mean its usual acceptance.
        self.by_confidence = _shrunk(self._counts, _shrunk(self._counts.sum(1), self.rate))


def _shrunk(counts: NDArray[np.float64], rate: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Return accepted by tried of `counts` [2, ...], as far as these outweigh the prior `rate`."""
    shares: NDArray[np.float64] = (counts[0] + PRIOR_TOKENS * rate) / (counts[1] + PRIOR_TOKENS)
    return shares


class Acceptance:
    """Acceptance by drafter and depth, and each row's own by its last rounds.

    Sampled rows and greedy ones are apart: what one kind showed would keep rows of the other from
    being drafted for. What is known of a row fades, drafted for or not, until it is its proposer's.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, bool], _Kind] = {}

    def observe(self, rounds: Iterable[tuple[Drafting, Round, bytes]]) -> None:
        """Take in rows' rounds, with the confidences of what was verified."""
        drafted: dict[_Kind, list[tuple[Round, bytes]]] = defaultdict(list)
        for d, round_, confidences in rounds:
            d.measured.observe(round_)
            if round_.drafted:
                drafted[self._kind(d.kind)].append((round_, confidences))
        for kind, those in drafted.items():
            kind.observe(those)

    def confident(self, rows: Rows[Drafting]) -> bool:
        """Return whether all rows' drafts tell how sure they are."""
        return all(self._kind(key).confident for key in {d.kind for d in rows})

    def survivals(self, rows: Rows[Drafting], depth: int) -> NDArray[np.float64]:
        """Return the expected gain of each draft token [num_rows, depth], which falls with depth.

        Of a chain it is the probability that the walk reaches the token. Of a tree, whose nodes
        lie beside each other, it is a level's share of that.
        """
        keys = [d.kind for d in rows]
        of_key = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        kinds, of_row = [self._kind(key) for key in of_key], [of_key[key] for key in keys]
        rate = np.array([kind.rate for kind in kinds])[of_row]
        measured = [d.measured for d in rows]
        shares, tried, levels = np.array(
            [(m.accepted.mean, m.accepted.weight, m.levels.mean) for m in measured]
        ).T
        own_rate = _shrunk(np.stack((shares * tried, tried)), rate)
        # How many times a row's odds are those of its kind.
        factors = own_rate / (1.0 - own_rate) * (1.0 - rate) / rate
        odds = np.array([kind.odds[:depth] for kind in kinds])[of_row] * factors[:, None]
        survivals: NDArray[np.float64] = (odds / (1.0 + odds)).cumprod(1)
        if levels.min() < 1.0:
            places = (levels[:, None] * np.arange(depth)).astype(np.int64)
            survivals = np.take_along_axis(survivals, places, 1) * levels[:, None]
        return survivals

    def told(self, drafts: Rows[tuple[Drafting, bytes]], depth: int) -> NDArray[np.float64]:
        """Return the survival of each token of chains [num_rows, depth] that told confidences.

        Past a chain's end it is 0.
        """
        rates = np.zeros((len(drafts), depth))
        for row, (d, confidences) in zip(rates, drafts, strict=True):
            bins = np.frombuffer(confidences, np.uint8) // (256 // BINS)
            row[: len(bins)] = self._kind(d.kind).by_confidence[np.arange(len(bins)), bins]
        return rates.cumprod(1)

    def _kind(self, key: tuple[str, bool]) -> _Kind:
        return remember(self._kinds, key, self._kinds.get(key) or _Kind())
