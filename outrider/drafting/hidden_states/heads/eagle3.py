"""EAGLE-3 (Li et al., arXiv 2503.01840): reads three states of the target, by one product.

The first layer takes the next token's embedding beside the state, each normed; the state is also
the residual. The output before the last norm is the next row's state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafting.hidden_states.heads.base import HeadSetup, spread
from outrider.drafting.hidden_states.heads.eagle3_format import Eagle3Format
from outrider.drafting.hidden_states.heads.llama import LlamaHead, read_stack
from outrider.engine.attention.base import StepAttention
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import Use
from outrider.features import FeatureSpec


class Eagle3Head(LlamaHead):
    """A module of EAGLE-3."""

    @classmethod
    def read(cls, folder: Path, setup: HeadSetup) -> Self:
        """Read a checkpoint like `yuhuili/EAGLE3-*`, or of `speculators`. Raises `ConfigError`."""
        return cls(Eagle3Format(folder), setup)

    def __init__(self, found: Eagle3Format, setup: HeadSetup) -> None:
        """Read all of a checkpoint. Raises `ConfigError`."""
        target, place = setup.target, setup.place
        stack = read_stack(found, setup, input_states=2)
        hidden, checkpoint = stack.shape.hidden_size, found.checkpoint
        super().__init__(stack, place, found.shared("embed_tokens.weight", target, hidden))

        def norm(name: str, size: int = hidden) -> Tensor:
            return place.put(checkpoint.tensor(name, size))

        first, aux = found.layer_prefixes[0], found.aux_layers(target.num_layers)
        self.features = FeatureSpec(hidden_size=target.hidden_size, layers=aux)
        self._token_norm = norm(f"{first}input_layernorm.weight")
        self._state_norm = norm(f"{first}hidden_norm.weight")
        self._norm = norm(found.name("norm.weight"))
        self._norm_before_residual = found.flag("norm_before_residual")
        self._norm_output = found.flag("norm_output")
        width = len(aux) * target.hidden_size
        self._whole_norm: Tensor | None = None  # [width]: of all states together, before fc
        self._part_norms: Tensor | None = None  # [aux, target hidden]: of each
        if found.flag("norm_before_fc", "input_norm.weight"):
            self._whole_norm = norm(found.name("input_norm.weight"), width)
        elif found.flag("fc_norm", "fc_norm.0.weight"):
            names = [found.name(f"fc_norm.{i}.weight") for i in range(len(aux))]
            self._part_norms = torch.stack([norm(name, target.hidden_size) for name in names])
        weight = checkpoint.tensor(found.name("fc.weight"), hidden, width)
        name = found.name("fc.bias")
        bias = checkpoint.tensor(name, hidden) if name in checkpoint else None
        self._fc_bias = None if bias is None else place.put(bias)
        self._fc: Linear | None = None
        if setup.project and self._whole_norm is None and self._part_norms is None:
            self._project(weight)
        else:
            self._fc = place.linear(weight, bias)
        head = found.shared("lm_head.weight", target, hidden)
        ids = found.draft_vocabulary(len(head), target.vocab_size)
        self._target_ids = None if ids is None else ids.to(place.device)
        self._head = place.linear(head)
        self.uses = (
            *(() if self._fc is None else (Use(self._fc, alone=True),)),
            *self._layer_uses,
            Use(self._head, None if self._norm_output else self._norm, alone=self._norm_output),
        )
        checkpoint.check_all_taken()

    def begin(self, features: Tensor) -> Tensor:
        eps = self._shape.eps
        x = features.to(self.dtype)
        if self._fc is None:
            return x if self._fc_bias is None else x + self._fc_bias
        if self._whole_norm is not None:
            x = self._ops.rms_norm(x, self._whole_norm, eps)
        elif self._part_norms is not None:
            parts = x.view(len(x), *self._part_norms.shape)
            x = F.rms_norm(parts, parts.shape[-1:], None, eps).mul_(self._part_norms).flatten(1)
        return self._fc(x)

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        attention: StepAttention,
        step: int,  # noqa: ARG002
    ) -> Tensor:
        ops, eps = self._ops, self._shape.eps
        tokens = ops.rms_norm(self._embed(token_ids), self._token_norm, eps)
        normed = ops.rms_norm(states, self._state_norm, eps)
        qkv = self._layers[0].qkv(torch.cat((tokens, normed), dim=-1))
        x = normed if self._norm_before_residual else states
        x = self._run_layers(qkv, x, attention)
        return ops.rms_norm(x, self._norm, eps) if self._norm_output else x

    def logits(self, outputs: Tensor) -> Tensor:
        if self._norm_output:
            known = self._head(outputs)
        else:
            known = self._ops.norm_linear(outputs, self._norm, self._shape.eps, self._head)
        return spread(known, self._target_ids, self.vocab_size)
