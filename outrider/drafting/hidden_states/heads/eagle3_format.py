"""What EAGLE-3 checkpoints leave to their readers: names, layer numbers, draft vocabularies."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.aux_layers import KEY, aux_layers, default_layers
from outrider.drafting.hidden_states.checkpoints import Checkpoint, TargetTensors
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Eagle3Format:
    """A checkpoint as its authors publish it (`yuhuili/EAGLE3-*`), or as `speculators` does."""

    checkpoint: Checkpoint
    layer_config: dict[str, Any]
    root: str  # before most tensors' names
    first_layer: str  # before those of the first layer

    @staticmethod
    def of(checkpoint: Checkpoint) -> Eagle3Format:
        config, names = checkpoint.config, checkpoint.names
        kind = config.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ConfigError(
                f"{checkpoint.folder} holds a speculator of type {kind!r}, not an EAGLE-3 module."
            )
        root = "model." if any(name.startswith("model.") for name in names) else ""
        layer = "midlayer." if any(n.startswith(f"{root}midlayer.") for n in names) else "layers.0."
        layer_config = checkpoint.group("transformer_layer_config") or config
        return Eagle3Format(checkpoint, layer_config, root, root + layer)

    def layer_prefix(self, index: int) -> str:
        return f"{self.root}layers.{index}." if index else self.first_layer

    def name(self, suffix: str) -> str:
        """As the file has it: some exporters leave the root out of some names."""
        rooted = f"{self.root}{suffix}"
        return rooted if rooted in self.checkpoint else suffix

    def optional(self, suffix: str, *shape: int) -> Tensor | None:
        name = self.name(suffix)
        return self.checkpoint.tensor(name, *shape) if name in self.checkpoint else None

    def flag(self, key: str, suffix: str | None = None) -> bool:
        """A setting; where config.json is silent, whether the tensor that it takes is there."""
        value = self.checkpoint.config.get(key, self.checkpoint.group("eagle_config").get(key))
        if value is None:
            return suffix is not None and self.name(suffix) in self.checkpoint
        return bool(value)

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of the target, which has `num_layers`, whose inputs it reads."""
        config, where = self.checkpoint.config, self.checkpoint.folder
        if self.checkpoint.group("eagle_config").get("use_aux_hidden_state") is False:
            raise ConfigError(f"{where}: use_aux_hidden_state false is not supported.")
        layers = aux_layers(config)
        if layers is None:
            if num_layers < 7:
                raise ConfigError(f"config.json in {where} must have {KEY} for so few layers.")
            return default_layers(num_layers)
        if layers[-1] > num_layers:
            raise ConfigError(
                f"config.json in {where}: {KEY} reads what enters layer {layers[-1]} of a target "
                f"that has {num_layers}."
            )
        return layers


def draft_vocabulary(found: Eagle3Format, draft_size: int, target: TargetTensors) -> Tensor | None:
    """int64 [draft_size]: the target's token of each draft token; None if they are the same.

    `d2t` holds differences to the draft token's own number. Raises `ConfigError` unless they are
    different tokens of the target, and those that the mask `t2d` names, if there is one.
    """
    where, size = found.checkpoint.folder, target.vocab_size
    mask = found.optional("t2d", size)
    d2t = found.optional("d2t", draft_size)
    if d2t is None:
        if draft_size != size:
            raise ConfigError(
                f"{where} holds no tensor d2t, which a draft vocabulary of {draft_size} tokens "
                f"takes: the target has {size}."
            )
        return None
    own = torch.arange(draft_size)
    for tokens in (d2t.long() + own, d2t.long()):
        if _fits(tokens, mask, size):
            return None if torch.equal(tokens, torch.arange(size)) else tokens
        if mask is None:
            break  # nothing tells absolute numbers from wrong ones
    raise ConfigError(
        f"d2t in {where} does not lead to {draft_size} different tokens of the target"
        + ("." if mask is None else ", those that t2d names.")
    )


def _fits(tokens: Tensor, mask: Tensor | None, vocab_size: int) -> bool:
    inside = bool(((tokens >= 0) & (tokens < vocab_size)).all())
    if not inside or len(set(tokens.tolist())) < len(tokens):
        return False
    if mask is None:
        return True
    return int(mask.sum()) == len(tokens) and bool(mask[tokens].all())


def matrix_bytes(weight: Tensor) -> tuple[bytes, bytes]:
    """A projection as it is sent, bfloat16, row-major, little-endian; and its SHA-256."""
    content = weight.bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
    return content, hashlib.sha256(content).digest()
