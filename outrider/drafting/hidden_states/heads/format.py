"""Read what several checkpoint formats share: names under a root, a draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint, TargetTensors
from outrider.errors import ConfigError


class HeadFormat:
    """A checkpoint whose tensors may have `model.` before their names."""

    layer_prefixes: Sequence[str]
    """Before the names of each layer's tensors, where the layers are Llama's."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint(folder)
        rooted = any(name.startswith("model.") for name in self.checkpoint.names)
        self.root = "model." if rooted else ""
        self.layer_config = (
            self.checkpoint.group("transformer_layer_config") or self.checkpoint.config
        )

    def num_layers(self) -> int:
        """Return the decoder layers that config.json names, by default 1. Raises `ConfigError`."""
        try:
            return int(self.layer_config.get("num_hidden_layers") or 1)
        except (TypeError, ValueError) as error:
            where = self.checkpoint.folder
            raise ConfigError(f"config.json in {where}: num_hidden_layers: {error}") from error

    def known_token(self, token: int | None, vocab_size: int) -> int:
        """Return `mask_token_id` if the embedding knows it. Raises `ConfigError`."""
        if token is None or not 0 <= token < vocab_size:
            raise ConfigError(
                f"config.json in {self.checkpoint.folder}: mask_token_id {token} is none of the "
                f"{vocab_size} tokens that the embedding knows."
            )
        return token

    def name(self, suffix: str) -> str:
        """Return a tensor's name in the file: some exporters leave the root out of some names."""
        rooted = f"{self.root}{suffix}"
        return rooted if rooted in self.checkpoint else suffix

    def optional(self, suffix: str, *shape: int) -> Tensor | None:
        """Return a tensor as it is stored, or None if the checkpoint does not have it."""
        name = self.name(suffix)
        return self.checkpoint.stored(name, *shape) if name in self.checkpoint else None

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

    def shared(self, name: str, target: TargetTensors, hidden: int) -> Tensor:
        """Return the checkpoint's embedding or output layer, or the target's where it fits.

        `name` is "embed_tokens.weight" or "lm_head.weight", `hidden` the layers' width. Raises
        `ConfigError`.
        """
        own = self.name(name)
        is_embedding = name == "embed_tokens.weight"
        if own in self.checkpoint:
            rows = target.vocab_size if is_embedding else len(self.checkpoint.stored(own))
            return self.checkpoint.tensor(own, rows, hidden)
        if hidden != target.hidden_size:
            raise ConfigError(
                f"{self.checkpoint.folder} holds no tensor {name}, which it needs: its layers are "
                f"{hidden} wide, the target's {target.hidden_size}."
            )
        return target.embedding() if is_embedding else target.head()


def _fits(tokens: Tensor, mask: Tensor | None, vocab_size: int) -> bool:
    inside = bool(((tokens >= 0) & (tokens < vocab_size)).all())
    if not inside or len(set(tokens.tolist())) < len(tokens):
        return False
    return mask is None or (int(mask.sum()) == len(tokens) and bool(mask[tokens].all()))
