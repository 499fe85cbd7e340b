"""The base class of the modules that are trained, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.train.layers import BlockShape
from outrider.train.target import TargetBatch


@dataclass(frozen=True)
class Export:
    """A checkpoint in a public format."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]  # without the dtype, which is always bfloat16

    def __post_init__(self) -> None:
        self.config["dtype"] = "bfloat16"


class Head(nn.Module):
    """A module that drafts from the target's states."""

    layers: tuple[int, ...] = ()
    """The head reads the states that enter these layers of the target."""
    draft_ids: Tensor | None
    """Target tokens that the head can draft, ascending; None: all."""
    table_names: ClassVar[tuple[str, ...]] = ()
    """Parts of the names of embeddings and head matrices, which learn by AdamW."""
    acceptance: Tensor | None = None
    """Logits [rows, length] that the last guess is right; None: the head foresees none."""
    draw: int = 0
    """The step of the run, by which a head draws the part of its chains that it trains."""
    begins: Tensor | None = None
    """The rows [n] at which the chains of the last `unroll` begin; None: every row."""

    def __init__(self, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("draft_ids", draft_ids)  # saved: the rows of a head follow it

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """Yield the guesses of chains that begin at every row, with the text's tokens as drafts.

        Step k yields logits `[rows, length, draft vocabulary]`. In them row p guesses token p + 2
        as the (k + 1)-th drafted token of the chain that began at row p - k, where tokens up to
        p - k + 1 and states up to p - k were known. The first k rows mean nothing.

        A head that sets `begins` yields `[rows, n, draft vocabulary]`: chain i guesses as row
        begins[i] + k.
        """
        raise NotImplementedError

    def guessing(self, step: int, length: int) -> Tensor:
        """Return the rows [n] as which chains guess in a step, the last for those beyond."""
        assert self.begins is not None
        return (self.begins + step).clamp(max=length - 1)

    def export(self) -> Export:
        """Return the checkpoint."""
        raise NotImplementedError


def draft_vocabulary_tensors(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return the maps between a draft vocabulary and the target's, as EAGLE-3 has them."""
    ids = draft_ids.cpu()
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": member}


def layer_fields(shape: BlockShape, max_positions: int, **rope: float) -> dict[str, Any]:
    """Return a decoder layer's settings, with RoPE under its newer and its older names."""
    theta = shape.rope_theta
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": max_positions,
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default", **rope},
        **rope,
    }
