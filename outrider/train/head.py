"""What the trainer asks of a method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from outrider.train.layers import BlockShape
from outrider.train.target import TargetBatch


@dataclass(frozen=True)
class Export:
    """A checkpoint in a public format."""

    file_name: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]


class Head(Protocol):
    """A module that drafts from the target's states."""

    layers: tuple[int, ...]
    """States it reads: those that enter these layers of the target."""
    draft_ids: Tensor | None
    """Target tokens that it can draft, ascending; None: all."""
    table_names: tuple[str, ...]
    """Parts of the names of embeddings and head matrices, which learn by AdamW."""

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """Guesses of chains that begin at every row at once, the text's tokens standing for drafts.

        Step k yields `[rows, length, draft vocabulary]` logits: row p guesses token p + 2 as the
        (k + 1)-th drafted token of the chain that began at row p - k, where tokens up to
        p - k + 1 and states up to p - k were known. The first k rows mean nothing.
        """
        ...

    def export(self) -> Export:
        """The checkpoint."""
        ...


def layer_fields(shape: BlockShape, max_positions: int, **rope: float) -> dict[str, Any]:
    """A decoder layer in a config; rotary embedding as newer and as older readers look for it."""
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
