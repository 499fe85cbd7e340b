"""The names, layer numbers and draft vocabularies of EAGLE-3 checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.aux_layers import KEY, aux_layers, default_layers
from outrider.drafting.hidden_states.checkpoints import Checkpoint
from outrider.errors import ConfigError


class Eagle3Format:
    """A checkpoint as its authors publish it (`yuhuili/EAGLE3-*`), or as `speculators` does."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = checkpoint = Checkpoint(folder)
        names = checkpoint.names
        kind = checkpoint.config.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ConfigError(
                f"{folder} holds a speculator of type {kind!r}, not an EAGLE-3 module."
            )
        self._root = root = "model." if any(name.startswith("model.") for name in names) else ""
        first = "midlayer." if any(n.startswith(f"{root}midlayer.") for n in names) else "layers.0."
        self.layer_config = checkpoint.group("transformer_layer_config") or checkpoint.config
        try:
            count = int(self.layer_config.get("num_hidden_layers") or 1)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config.json in {folder}: num_hidden_layers: {error}") from error
        later = [f"layers.{i}." for i in range(1, count)]
        self.layer_prefixes = [root + name for name in (first, *later)]

    def name(self, suffix: str) -> str:
        """Return a tensor's name in the file: some exporters leave the root out of some names."""
        rooted = f"{self._root}{suffix}"
        return rooted if rooted in self.checkpoint else suffix

    def optional(self, suffix: str, *shape: int) -> Tensor | None:
        """Return a tensor as it is stored, or None if the checkpoint does not have it."""
        name = self.name(suffix)
        return self.checkpoint.stored(name, *shape) if name in self.checkpoint else None

    def flag(self, key: str, suffix: str | None = None) -> bool:
        """Return a setting; where config.json is silent, whether its tensor is there."""
        value = self.checkpoint.config.get(key, self.checkpoint.group("eagle_config").get(key))
        if value is None:
            return suffix is not None and self.name(suffix) in self.checkpoint
        return bool(value)

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers, of the target's `num_layers`, whose inputs the module reads."""
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

    def draft_vocabulary(self, draft_size: int, vocab_size: int) -> Tensor | None:
        """Return the target's token of each draft token, int64; None if they are the same.

        `d2t` holds differences to the draft token's own number. Raises `ConfigError` unless they
        lead to different tokens of the target, and those that the mask `t2d` names, if there is
        one.
        """
        where = self.checkpoint.folder
        mask = self.optional("t2d", vocab_size)
        d2t = self.optional("d2t", draft_size)
        if d2t is None:
            if draft_size != vocab_size:
                raise ConfigError(
                    f"{where} holds no tensor d2t, which a draft vocabulary of {draft_size} tokens "
                    f"takes: the target has {vocab_size}."
                )
            return None
        for tokens in (d2t.long() + torch.arange(draft_size), d2t.long()):
            if _fits(tokens, mask, vocab_size):
                return None if torch.equal(tokens, torch.arange(vocab_size)) else tokens
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
    return mask is None or (int(mask.sum()) == len(tokens) and bool(mask[tokens].all()))
