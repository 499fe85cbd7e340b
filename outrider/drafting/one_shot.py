"""Drafting from one state of the target, without keys and values: Medusa, MLP speculator.

After n committed tokens the head sees the target's state at n - 2, which is the last known one, and
the token at n - 1, which was drawn from it. So of a session's rows only the last is kept, a prompt
costs nothing, and a session that is opened anew can be drafted for at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.branch_plan import NO_PACE, Pace
from outrider.drafting.feature_session import FeatureMethod, FeatureSession
from outrider.drafting.guess_trees import Nodes, TargetDraws
from outrider.drafting.proposer import DraftRound, ProposerTraits, SessionKey
from outrider.errors import ConfigError
from outrider.features import FeatureSpec
from outrider.params import SamplingParams

TREE_WIDTH = 8
"""Children of a node that are looked at, and nodes of a depth whose children are."""
_MAX_SCORES = 2**25  # of one batch: float32, with as much again for noise
_GREEDY = SamplingParams(temperature=0.0)


class OneShotHead(Protocol):
    """Guesses several tokens from one state of the target."""

    @property
    def features(self) -> FeatureSpec:
        """What it needs of the target."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        ...

    @property
    def max_depth(self) -> int:
        """Tokens that it foresees."""
        ...

    @property
    def device(self) -> torch.device: ...

    def grow(
        self, states: Tensor, tokens: Tensor, draws: TargetDraws, sizes: Sequence[int], width: int
    ) -> list[Nodes]:
        """A tree of guesses per row, of `sizes[i]` nodes at most.

        states: bfloat16 [n, features.width]; tokens int64 [n], which were drawn from them; both on
        `device`. With `width` 1 trees are chains. Rows do not affect each other.
        """
        ...


class OneShotProposer(FeatureMethod):
    """Drafts with a `OneShotHead`, batched over sessions. Raises `ConfigError`.

    With `tree_width` 1 a draft is a chain, no longer than the head foresees; else a tree of as many
    nodes as draft tokens are wanted. A session that rejection verifies gets the likeliest tokens:
    they are drawn from nothing, and the target's noise says nothing of what it accepts.
    """

    def __init__(
        self,
        head: OneShotHead,
        *,
        method: str,
        name: str,
        max_model_len: int,
        max_sessions: int = 256,
        max_draft_tokens: int = 16,
        tree_width: int = TREE_WIDTH,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if max_sessions < 1 or max_draft_tokens < 1 or tree_width < 1:
            raise ConfigError("max_sessions, max_draft_tokens and tree_width are at least 1.")
        chains = tree_width == 1
        super().__init__(
            ProposerTraits(
                method=method,
                model=name,
                vocab_size=head.vocab_size,
                max_sessions=max_sessions,
                max_draft_tokens=min(max_draft_tokens, head.max_depth)
                if chains
                else max_draft_tokens,
                max_model_len=max_model_len,
                features=head.features,
            )
        )
        self._head = head
        self._width = tree_width
        self._clock = clock
        self._at_once = max(1, _MAX_SCORES // (tree_width * head.vocab_size))

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        done = DraftRound(lost=self._take_lost())
        ready: list[FeatureSession] = []
        for state in self._asked(sessions):
            if state.follower.wanted == 0:
                done.drafts.append((state.key, DraftTree.chain(len(state.follower.tokens), ())))
            elif state.ready:
                ready.append(state)
            else:
                done.unfinished.append(state.key)
        if not ready:
            return done
        started = self._clock()
        for i in range(0, len(ready), self._at_once):
            part = ready[i : i + self._at_once]
            for state, (token_ids, parents) in zip(part, self._grow(part), strict=True):
                base_len = len(state.follower.tokens)
                tree = DraftTree(base_len, tuple(token_ids), tuple(parents))
                done.drafts.append((state.key, tree))
        return DraftRound(
            done.drafts,
            unfinished=done.unfinished,
            lost=done.lost,
            forward_s=self._clock() - started,
        )

    def _grow(self, ready: Sequence[FeatureSession]) -> list[Nodes]:
        device = self._head.device
        texts = [state.follower.tokens for state in ready]
        with torch.inference_mode():
            states = torch.cat(
                [state.rows(state.num_rows - 1, state.num_rows) for state in ready]
            ).to(device, non_blocking=True)
            tokens = torch.tensor([text[-1] for text in texts]).to(device, non_blocking=True)
            draws = TargetDraws(
                [_GREEDY if state.samples else state.follower.sampling for state in ready],
                [len(text) for text in texts],
                device,
            )
            sizes = [state.follower.wanted for state in ready]
            return self._head.grow(states, tokens, draws, sizes, self._width)

    def _used(self, state: FeatureSession) -> None:
        state.forget(len(state.follower.tokens) - 2)  # no later draft looks at them
