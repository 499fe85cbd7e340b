"""IBM's MLP speculator (Wertheimer et al., arXiv 2404.19124): a small recurrence over tokens.

Its state begins as the target's last known one and takes in a token at every step. A guess depends
on the guess before, so the likeliest tokens are followed in a beam.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint
from outrider.drafting.hidden_states.heads.base import HeadSetup
from outrider.drafting.hidden_states.trees import Guess, TargetDraws, guess_paths, trees_of_paths
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import Use
from outrider.engine.model.pack import pack_linear
from outrider.errors import ConfigError
from outrider.features import FeatureSpec

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SpeculatorStage:
    """The weights of one step. Tied checkpoints have the same in all steps but `proj`."""

    emb: Tensor  # [vocab, inner]
    proj: Tensor  # [inner, hidden] in the first step, then [inner, inner]
    ln_weight: Tensor  # [inner]
    ln_bias: Tensor  # [inner]
    head: Tensor  # [vocab, inner]


class MlpSpeculatorHead:
    """A `OneShotHead` that computes in the weights' dtype, on their device.

    `stages` are all n_predict of the checkpoint, also if fewer are used, since their number sets
    the weights of state and token. `scale_input` normalises the target's state first.
    """

    def __init__(self, stages: Sequence[SpeculatorStage], *, scale_input: bool) -> None:
        first = stages[0]
        self.features = FeatureSpec(hidden_size=first.proj.shape[1], final_norm=True)
        self.vocab_size = len(first.head)
        self.max_depth = len(stages)
        self.device = first.head.device
        self._dtype = first.head.dtype
        self._emb = [stage.emb for stage in stages]
        self._ln = [(stage.ln_weight, stage.ln_bias) for stage in stages]
        packed: dict[int, Linear] = {}  # tied weights are packed once
        for stage in stages:
            for weight in (stage.proj, stage.head):
                if id(weight) not in packed:
                    packed[id(weight)] = pack_linear(weight, None)
        self._proj = [packed[id(stage.proj)] for stage in stages]
        self._head = [packed[id(stage.head)] for stage in stages]
        pairs = zip(self._proj, self._head, strict=True)
        self.uses: Sequence[Use] = [Use(linear, alone=True) for pair in pairs for linear in pair]
        self._scale_input = scale_input
        inner = first.emb.shape[1]
        state_weight = 0.5 ** (0.5 / len(stages))
        # The state weighs 1, since the norm that follows takes out a common factor.
        self._token_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def begin(self, states: Tensor) -> Tensor:
        states = states.to(self._dtype)
        return _normed(states) / math.sqrt(2) if self._scale_input else states

    def step(self, states: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        weight, bias = self._ln[depth]
        x = self._proj[depth](states) + self._token_weight * self._emb[depth][tokens]
        x = F.gelu(weight * _normed(x) + bias)
        return x, self._head[depth](x).float()

    def guess(
        self, states: Tensor, tokens: Tensor, draws: TargetDraws, depth: int, width: int
    ) -> Tensor:
        """Return what `guess_paths` does."""
        return guess_paths(self.step, self.begin(states), tokens, draws, depth, width)

    def trees(self, guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Guess]:
        return trees_of_paths(guesses, sizes)


def _normed(x: Tensor) -> Tensor:
    """Divide x by the root of its mean square; no mean is taken out."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + _EPS)).to(x.dtype)


def read_mlp_speculator(folder: Path, setup: HeadSetup) -> MlpSpeculatorHead:
    """Read a checkpoint in the format of ibm-fms (`model_type` mlp_speculator).

    Raises `ConfigError`, naming the setting or the tensor that does not fit the format or the
    target.
    """
    checkpoint, target = Checkpoint(folder), setup.target
    config = checkpoint.config
    if config.get("model_type") != "mlp_speculator":
        raise ConfigError(
            f"config.json in {folder}: model_type is {config.get('model_type')!r}, not "
            "'mlp_speculator'."
        )
    hidden, vocab = checkpoint.number("emb_dim"), checkpoint.number("vocab_size")
    if (hidden, vocab) != (target.hidden_size, target.vocab_size):
        raise ConfigError(
            f"config.json in {folder}: emb_dim {hidden} and vocab_size {vocab} must be the "
            f"target's hidden_size {target.hidden_size} and vocab_size {target.vocab_size}."
        )
    inner = config.get("inner_dim") and checkpoint.number("inner_dim")
    inner = inner or hidden  # 0: the same
    num_stages = checkpoint.number("n_predict")
    tied = bool(config.get("tie_weights", False))
    prefix = "speculator." if any(n.startswith("speculator.") for n in checkpoint.names) else ""
    loaded: dict[str, Tensor] = {}

    def take(kind: str, stage: int, *shape: int, leaf: str = "weight") -> Tensor:
        if tied:  # the first projection alone takes the target's state
            stage = min(stage, 1) if kind == "proj" else 0
        name = f"{prefix}{kind}.{stage}.{leaf}"
        if name not in loaded:
            loaded[name] = setup.place.put(checkpoint.tensor(name, *shape))
        return loaded[name]

    stages = [
        SpeculatorStage(
            emb=take("emb", i, vocab, inner),
            proj=take("proj", i, inner, inner if i else hidden),
            ln_weight=take("ln", i, inner),
            ln_bias=take("ln", i, inner, leaf="bias"),
            head=take("head", i, vocab, inner),
        )
        for i in range(num_stages)
    ]
    checkpoint.check_all_taken(_copies(checkpoint, prefix, num_stages) if tied else ())
    return MlpSpeculatorHead(stages, scale_input=bool(config.get("scale_input", False)))


def _copies(checkpoint: Checkpoint, prefix: str, num_stages: int) -> list[str]:
    """Return the tied tensors that are written once a step. Raises `ConfigError` if they differ."""
    copies = []
    for kind in ("emb.{}.weight", "proj.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight"):
        first = 1 if kind.startswith("proj") else 0
        for stage in range(first + 1, num_stages):
            copy, tied = (f"{prefix}{kind.format(i)}" for i in (stage, first))
            if copy not in checkpoint:
                continue
            if not torch.equal(checkpoint.stored(copy), checkpoint.stored(tied)):
                raise ConfigError(
                    f"config.json in {checkpoint.folder} has tie_weights, but {copy} is not {tied}."
                )
            copies.append(copy)
    return copies
