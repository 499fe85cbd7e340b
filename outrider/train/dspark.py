"""DSpark, in the layout of DeepSpec: DFlash's blocks, whose slots know the token before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.train.dflash import DFlash, DFlashShape
from outrider.train.head import Export
from outrider.train.target import Target, TargetBatch


class Markov(nn.Module):
    """A bias of low rank for the token after each token, zero at first."""

    def __init__(self, vocab_size: int, num_guessed: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_guessed, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class Confidence(nn.Module):
    """The logit of a slot's acceptance, given that those before were accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)


class DSpark(DFlash):
    """A `DFlash` with a bias by the token before, and a confidence for each slot."""

    table_names: ClassVar[tuple[str, ...]] = ("lm_head", "markov_head", "confidence_head")
    from_anchor: ClassVar[bool] = True

    def __init__(
        self,
        target: Target,
        sizes: DFlashShape,
        draft_ids: Tensor | None,
        sample: Tensor,
        rank: int,
    ) -> None:
        super().__init__(target, sizes, draft_ids, sample)
        guessed = self.vocab_size if draft_ids is None else len(draft_ids)
        self.markov_head = Markov(self.vocab_size, guessed, rank)
        self.confidence_head = Confidence(sizes.layer.hidden_size + rank)

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """Yield guesses as `DFlash`, and set `acceptance` to the logits of each."""
        ids = batch.token_ids[:, 1:]
        table = self.shared_head if self.draft_ids is None else self.lm_head.weight
        bias = self.markov_head.markov_w2.weight
        head = torch.cat((table.to(bias.dtype), bias), -1)
        for step, slot in enumerate(self._slots(batch, num_steps)):
            # The row that guesses token p + 2 has token p + 1 before it.
            known = ids if self.begins is None else ids[:, self.guessing(step, ids.shape[1])]
            before = self.markov_head.markov_w1(known)
            both = torch.cat((slot, before.to(slot.dtype)), -1)
            self.acceptance = self.confidence_head.proj(both.detach())[..., 0]
            yield F.linear(both, head.to(both.dtype))

    def export(self) -> Export:
        """Return tensors and config as DeepSpec's checkpoints have them."""
        found = super().export()
        settings: dict[str, Any] = found.config.pop("dflash_config")
        rank = self.markov_head.markov_w1.embedding_dim
        config = {
            **found.config,
            **settings,
            "architectures": ["Qwen3DSparkModel"],
            "markov_rank": rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        return Export(found.tensors, config)
