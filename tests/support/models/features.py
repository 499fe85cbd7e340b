"""A model whose hidden states can be told in advance, and a proposer that checks every one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.hidden_states.session import FeatureMethod, FeatureSession
from outrider.drafting.proposer import NO_PACE, DraftRound, Pace, ProposerTraits, SessionKey
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.kv_cache.memory import move
from outrider.features import FeatureSpec
from tests.support.models.hash_model import HashModel, context_hash

SIZE, NUM_LAYERS = 4, 6
CAPTURED = FeatureSpec(SIZE, (0, 2, NUM_LAYERS), final_norm=True)


def state(context: Sequence[int], name: str) -> list[int]:
    """What the model below hands on at the last position of `context`: exact in bfloat16."""
    place = 99 if name == "final" else int(name)
    return [byte + 1 for byte in context_hash([*context, place]).to_bytes(SIZE, "little")]


def row(context: Sequence[int], spec: FeatureSpec, projection: Tensor | None = None) -> Tensor:
    """bfloat16 [width]: the row of the last position of `context`."""
    values = [value for name in spec.states for value in state(context, name)]
    captured = torch.tensor(values, dtype=torch.bfloat16)
    return captured if projection is None else projection @ captured


class FeatureHash:
    """Gives a `HashModel` hidden states, in the pages of its tokens; a mixin before it."""

    features: HiddenStatePool

    def capture(self, spec: FeatureSpec = CAPTURED) -> HiddenStatePool:
        assert isinstance(self, HashModel)
        pages = len(self._slots) // self.page_size
        self.features = HiddenStatePool(spec, pages, self.page_size, self.device)
        self.features.rows.fill_(float("nan"))  # no state that was not written may be sent
        return self.features

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        super().move_slots(source, target)  # type: ignore[misc]
        move(self.features.rows[None], source, target)

    def forward(self, batch: PackedBatch) -> Tensor:
        assert isinstance(self, HashModel)
        logits: Tensor = super().forward(batch)  # type: ignore[misc]
        pool = self.features
        for row_index, (start, end) in enumerate(
            zip(batch.cu_seqlens_q[:-1].tolist(), batch.cu_seqlens_q[1:].tolist(), strict=True)
        ):
            for index in range(start, end):
                context = self._context(batch, row_index, index)
                slot = batch.slot_mapping[index : index + 1]
                for layer in pool.spec.layers:
                    pool.enter(layer, slot, torch.tensor([state(context, str(layer))]))
                if pool.spec.final_norm:
                    pool.final(slot, torch.tensor([state(context, "final")]))
        return logits


def selection(spec: FeatureSpec, dim: int) -> tuple[FeatureSpec, Tensor]:
    """A projection that picks values of a row, so that its results are exact; and its spec."""
    matrix = torch.zeros(dim, spec.captured_width, dtype=torch.bfloat16)
    order = np.random.default_rng(0).permutation(spec.captured_width)[:dim].copy()
    matrix[torch.arange(dim), torch.from_numpy(order)] = 1.0
    digest = hashlib.sha256(matrix.view(torch.uint8).numpy().tobytes()).digest()
    return FeatureSpec(spec.hidden_size, spec.layers, spec.final_norm, dim, digest), matrix


class RowReader(FeatureMethod):
    """Drafts the tree `guess(tokens, k)`, of k nodes at most, once all rows are there.

    `seen` counts the rows of each session that was to be drafted for, `wrong` those among them
    that were not what they must be.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        guess: Callable[[Sequence[int], int], DraftTree],
        *,
        vocab_size: int,
        projection: Tensor | None = None,
    ) -> None:
        super().__init__(
            ProposerTraits(
                method="eagle",
                model="row reader",
                vocab_size=vocab_size,
                max_sessions=64,
                max_draft_tokens=8,
                max_model_len=4096,
                features=spec,
            )
        )
        self._spec, self._guess = spec, guess
        self._matrix = projection
        self.wrong = self.unfinished = 0
        self.seen: dict[SessionKey, int] = {}

    @property
    def projection(self) -> bytes:
        return b"" if self._matrix is None else self._matrix.view(torch.uint8).numpy().tobytes()

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        done = DraftRound()
        for known in self._asked(sessions):
            self.seen.setdefault(known.key, 0)
            tokens = known.follower.tokens
            if known.num_rows > known.first:
                self._compare(known, known.rows(known.first, known.num_rows))
                known.forget(known.num_rows)
            if not known.ready and len(tokens) > 1:
                self.unfinished += 1
                done.unfinished.append(known.key)
                continue
            tree = self._guess(tokens, known.follower.wanted)
            known.follower.push(tree)
            done.drafts.append((known.key, tree))
        done.lost.extend(self._take_lost())
        return done

    @property
    def rows_seen(self) -> int:
        return sum(self.seen.values())

    def _compare(self, known: FeatureSession, rows: Tensor) -> None:
        self.seen[known.key] += len(rows)
        for position, got in enumerate(rows, known.first):
            expected = row(known.follower.tokens[: position + 1], self._spec, self._matrix)
            self.wrong += not torch.equal(got, expected)
