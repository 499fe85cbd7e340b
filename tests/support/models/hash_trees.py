"""A head that grows trees of what a `HashModel` is likely to say, and tells how sure it is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.drafting.hidden_states.trees import TargetDraws, guess_paths, trees_of_paths
from outrider.drafting.proposer import (
    NO_PACE,
    DraftRound,
    Follower,
    Pace,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.drafting.sessions import SessionMethod
from tests.support.models.hash_model import HashModel, context_hash
from tests.support.simulators.methods import Clock

DEPTH, WIDTH = 6, 4


@dataclass
class _Session:
    key: SessionKey
    follower: Follower


class HashTrees(SessionMethod[_Session]):
    """Agrees with the target the more, the smaller `eps` is. One that `lies` tells anything."""

    def __init__(self, clock: Clock, model: HashModel, eps: float, *, lies: bool = False) -> None:
        limits = {"max_sessions": 256, "max_draft_tokens": 16, "max_model_len": 4096}
        super().__init__(ProposerTraits("eagle", "", model.vocab_size, **limits), clock)
        self._time, self._model, self._eps = clock, model, eps
        self._lies = random.Random(1) if lies else None

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        rows, done = self._asked(sessions), DraftRound()
        texts = [each.follower.tokens for each in rows]
        sizes = [each.follower.wanted for each in rows]
        if not rows:
            return done
        states = torch.tensor([context_hash(text[:-1]) for text in texts])
        last = torch.tensor([text[-1] for text in texts])
        sampling = [each.follower.draft_sampling for each in rows]
        draws = TargetDraws.of(sampling, [len(text) for text in texts], torch.device("cpu"))
        depth = min(DEPTH, max(1, *sizes))
        self._time.now += 0.0003 * (1 + depth)
        found = guess_paths(self._step, states, last, draws, depth, WIDTH).numpy()
        for each, guess in zip(rows, trees_of_paths(found, sizes), strict=True):
            tree = guess.tree(len(each.follower.tokens))
            if self._lies:
                tree = tree._replace(confidences=self._lies.randbytes(len(tree.token_ids)))
            done.drafts.append((each.key, tree))
        return done

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:  # noqa: ARG002
        return DraftRound()

    def _step(self, states: Tensor, tokens: Tensor, _place: int) -> tuple[Tensor, Tensor]:
        """Go on as `context_hash` does."""
        states = ((states ^ (tokens + 1)) * 0x01000193 + 0x9E3779B9) & 0xFFFFFFFF
        states = states ^ (states >> 15)
        hashes = states.numpy().astype(np.uint64)
        said, other = (self._model._logits(each) for each in (hashes, hashes ^ 0x5BD1E995))
        return states, torch.from_numpy((1 - self._eps) * said + self._eps * other)

    def _follow(self, state: _Session, fresh: Sequence[int]) -> None: ...

    def _release(self, state: _Session) -> None: ...

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> _Session:  # noqa: ARG002
        return _Session(key, follower)
