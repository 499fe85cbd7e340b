"""Measure how much of drafts is accepted, and hold what else any policy measures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from outrider.bounded import remember
from outrider.drafted_nodes import DraftNodes
from outrider.params import MAX_SPECULATIVE_TOKENS
from outrider.policy.draft_times import DraftTimes
from outrider.policy.row import ConfidentDraft, Drafting
from outrider.rounds import Round
from outrider.step_times import EngineStepTimes

PRIOR_RATE = 0.8  # accepted of an unknown proposer's tokens: it is worth a try
PRIOR_TOKENS = 8.0  # of a row or a depth that say as much of it as all that is known besides
PROPOSER_FADE = 0.99  # kept per round of what a proposer's drafts met
BINS = 16  # of confidences, of which a byte tells 256: the rest is noise
BIN_OF = bytes([told * BINS // 256 for told in range(256)])
SAID = 1.0 / (1.0 + np.exp(7.5 - np.arange(BINS)))  # by the log odds in the middle of each bin


class _Kind:
    """Drafts of one method of one proposer, for rows that are sampled or for those that are not."""

    def __init__(self) -> None:
        self._levels = np.zeros((2, MAX_SPECULATIVE_TOKENS))  # of drafts: accepted, tried
        self._nodes = np.zeros((2, MAX_SPECULATIVE_TOKENS, BINS))  # that told a confidence
        self._learn()

    def observe(self, rounds: Rows[tuple[Round, DraftNodes]]) -> None:
        """Take in rounds, and the nodes of their drafts if these told confidences."""
        self._levels *= PROPOSER_FADE ** len(rounds)
        for round_, number in Counter([each for each, _ in rounds]).items():
            self._levels[0, : round_.accepted] += number
            self._levels[1, : round_.tried] += number
        tried = [
            (depth * BINS + BIN_OF[told], accepted)
            for round_, nodes in rounds
            if nodes.confidences
            for depth, told, accepted in nodes.tried(round_.last)
        ]
        if tried:
            places, accepted = zip(*tried, strict=True)
            counts = [np.bincount(places, each, self._nodes[0].size) for each in (accepted, None)]
            fresh = np.reshape(counts, self._nodes.shape)
            # What was not tried again is not forgotten: it would be tried for that alone.
            self._nodes = self._nodes * PROPOSER_FADE ** fresh[1] + fresh
        self._learn()

    def _learn(self) -> None:
        self.rate = float(_shrunk(self._levels.sum(1), PRIOR_RATE))
        by_depth = _shrunk(self._levels, self.rate)
        self.odds = by_depth / (1.0 - by_depth)  # [depths]
        # Until its tokens were tried a confidence means what it says, or the mean of all if that is
        # more. A liar's say nothing, and so all of them come to mean its usual acceptance.
        usual = np.maximum(_shrunk(self._nodes.sum((1, 2)), PRIOR_RATE), SAID)
        self.by_confidence = _shrunk(self._nodes, _shrunk(self._nodes.sum(1), usual))


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

    def observe(self, rows: Iterable[tuple[Drafting, Rows[tuple[Round, DraftNodes]]]]) -> None:
        """Take in rows' rounds, with the nodes that were verified."""
        drafted: dict[tuple[str, bool], list[tuple[Round, DraftNodes]]] = defaultdict(list)
        for d, rounds in rows:
            own = d.measured
            for (num_tokens, depth, accepted, rejected, _), _ in rounds:
                tried = accepted + rejected
                own.accepted.add(accepted / tried if tried else 0.0, tried)
                if depth < num_tokens or (depth and own.levels.mean < 1.0):  # else it stays 1
                    own.levels.add(depth / num_tokens)
            drafted[d.kind] += [each for each in rounds if each[0].drafted]
        for kind, those in drafted.items():
            if those:
                self._kind(kind).observe(those)

    def survivals(self, rows: Rows[Drafting], depth: int) -> NDArray[np.float64]:
        """Return the expected gain of each draft token [num_rows, depth], which falls with depth.

        Of a chain it is the probability that the walk reaches the token. Of a tree, whose nodes
        lie beside each other, it is a level's share of that.
        """
        kinds, of_row = self._kinds_of(rows)
        rate = np.array([kind.rate for kind in kinds])[of_row]
        own = [(d.measured.accepted, d.measured.levels.mean) for d in rows]
        shares, tried, levels = np.array([(a.mean, a.weight, level) for a, level in own]).T
        own_rate = _shrunk(np.stack((shares * tried, tried)), rate)
        # How many times a row's odds are those of its kind.
        factors = own_rate / (1.0 - own_rate) * (1.0 - rate) / rate
        odds = np.array([kind.odds[:depth] for kind in kinds])[of_row] * factors[:, None]
        by_level = (odds / (1.0 + odds)).cumprod(1)
        places = (levels[:, None] * np.arange(depth)).astype(np.int64)
        survivals: NDArray[np.float64] = np.take_along_axis(by_level, places, 1) * levels[:, None]
        return survivals

    def survivals_of_nodes(self, drafts: Rows[ConfidentDraft]) -> list[float]:
        """Return the survival of each node [n] of `drafts`, one after the other."""
        kinds, of_draft = self._kinds_of([d for d, _ in drafts])
        rates = [kind.by_confidence.item for kind in kinds]
        found: list[float] = []
        # Loops, because NumPy takes longer to begin than these few numbers take.
        for (_, nodes), place in zip(drafts, of_draft, strict=True):
            bins = nodes.confidences.translate(BIN_OF)
            found += nodes.products(map(rates[place], nodes.depths, bins))
        return found

    def _kinds_of(self, rows: Rows[Drafting]) -> tuple[list[_Kind], list[int]]:
        """Return the kinds of rows' drafts, and each row's place among them."""
        keys = [d.kind for d in rows]
        places = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return [self._kind(key) for key in places], [places[key] for key in keys]

    def _kind(self, key: tuple[str, bool]) -> _Kind:
        return remember(self._kinds, key, self._kinds.get(key) or _Kind())


class Measurements:
    """The times of steps and drafts, and acceptance, as any policy measures them."""

    def __init__(self) -> None:
        self.steps = EngineStepTimes()
        self.acceptance = Acceptance()
        self._drafts: dict[str, DraftTimes] = {}  # by drafter

    def draft_times(self, d: Drafting) -> DraftTimes:
        """Return what a row's drafts take, to be added to."""
        return remember(self._drafts, d.drafter, self._drafts.get(d.drafter) or DraftTimes())
