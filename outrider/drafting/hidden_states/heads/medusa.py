"""Medusa heads (Cai et al., arXiv 2401.10774): each predicts one of the next tokens by itself.

Head i takes the target's last known state x, through residual blocks x + SiLU(A x + b), to logits
for the token i + 1 places after the one that was drawn from x. The heads know nothing of each
other's tokens, so the probability of a path is the product of its tokens' probabilities.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint
from outrider.drafting.hidden_states.heads.base import HeadSetup, spread
from outrider.drafting.hidden_states.trees import Guess, TargetDraws, guess_places, trees_of_places
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import Use
from outrider.engine.model.pack import pack_linear
from outrider.errors import ConfigError
from outrider.features import FeatureSpec


class MedusaHead:
    """A `OneShotHead` that computes in the weights' dtype, on their device."""

    def __init__(
        self,
        blocks: Sequence[Sequence[tuple[Tensor, Tensor | None]]],
        lm_heads: Sequence[Tensor],
        vocab_size: int,
        token_map: Tensor | None = None,
    ) -> None:
        """`blocks` are [heads][layers] (weight [hidden, hidden], bias [hidden]).

        `lm_heads` [known tokens, hidden] are one for all heads, or one per head; `token_map` int64
        [known tokens] are the target's tokens that they know, None: all.
        """
        first = lm_heads[0]
        self.features = FeatureSpec(hidden_size=first.shape[1], final_norm=True)
        self.vocab_size = vocab_size
        self.max_depth = len(blocks)
        self.device = first.device
        self._dtype = first.dtype
        self._blocks = [[pack_linear(*layer) for layer in layers] for layers in blocks]
        products: list[Linear] = [pack_linear(weight, None) for weight in lm_heads]
        self._lm_heads = products * (self.max_depth // len(products))
        linears = [linear for layers in self._blocks for linear in layers] + products
        self.uses: Sequence[Use] = [Use(linear, alone=True) for linear in linears]
        self._token_map = token_map

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Return the logits of head `depth`: [n, hidden] to float32 [n, vocab]."""
        known = self._lm_heads[depth](self._hidden(states, depth))
        return spread(known, self._token_map, self.vocab_size)

    def begin(self, states: Tensor) -> Tensor:
        return states.to(self._dtype)

    def step(self, states: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return states, self.logits(states, depth)

    def guess(
        self,
        states: Tensor,
        tokens: Tensor,  # noqa: ARG002 - the state tells it all
        draws: TargetDraws,
        depth: int,
        width: int,
    ) -> Tensor:
        """int32 [n, 2, depth, width]: the likeliest tokens of each place, and their log probs."""
        logits = self._all_logits(self.begin(states), depth)
        return guess_places(torch.stack(logits, dim=1), draws, width)

    def trees(self, guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Guess]:
        return trees_of_places(guesses, sizes)

    def _all_logits(self, states: Tensor, num_heads: int) -> list[Tensor]:
        if len(set(map(id, self._lm_heads))) > 1:
            return [self.logits(states, depth) for depth in range(num_heads)]
        # One product of all reads the large layer once.
        hidden = torch.cat([self._hidden(states, depth) for depth in range(num_heads)])
        logits = spread(self._lm_heads[0](hidden), self._token_map, self.vocab_size)
        return list(logits.chunk(num_heads))

    def _hidden(self, states: Tensor, depth: int) -> Tensor:
        x = states
        for layer in self._blocks[depth]:
            x = x + F.silu(layer(x))
        return x


class _Layout(NamedTuple):
    """Names of a checkpoint's tensors: head i, layer j, in heads of n layers."""

    layer_weight: str  # a regular expression of i and j
    layer: str
    lm_head: str


_LAYOUTS = (  # of FasterDecoding and text-generation-inference; of vLLM
    _Layout(r"(\d+)\.(\d+)\.linear\.weight", "{i}.{j}.linear", "{i}.{n}.weight"),
    _Layout(
        r"blocks\.(\d+)\.layers\.(\d+)\.weight", "blocks.{i}.layers.{j}", "lm_heads.{i}.weight"
    ),
)
_FILE = "medusa_lm_head"  # as published, which may lie beside the whole model's files
_PREFIXES = ("", "medusa_head.", "medusa_heads.")  # with one: inside the whole model's file


def read_medusa(folder: Path, setup: HeadSetup) -> MedusaHead:
    """Read Medusa heads: FasterDecoding's file or vLLM's, or those inside a whole model's.

    Heads and layers are counted, since published configurations have wrong numbers. Raises
    `ConfigError`, naming the tensor that does not fit the format or the target.
    """
    checkpoint, target, place = Checkpoint(folder, preferred=_FILE), setup.target, setup.place
    config = checkpoint.config
    layout, prefix, num_heads, num_layers = _find_heads(checkpoint)
    needs_bias = layout is _LAYOUTS[0] or bool(config.get("medusa_fc_bias", False))
    spelt = re.compile(re.escape(prefix) + layout.layer_weight.replace("weight", "bias"))
    needs_bias = needs_bias or any(map(spelt.fullmatch, checkpoint.names))
    token_map, known = None, config.get("truncated_vocab_size")
    name = f"{prefix}token_map"
    if known != target.vocab_size and (known is not None or name in checkpoint):
        token_map = checkpoint.token_ids(name, target.vocab_size, known)
    scale = config.get("logit_scale") or 1.0
    if not isinstance(scale, int | float):
        raise ConfigError(f"config.json in {folder}: logit_scale must be a number.")

    def layer(i: int, j: int) -> tuple[Tensor, Tensor | None]:
        name = prefix + layout.layer.format(i=i, j=j)
        size = target.hidden_size
        weight = place.put(checkpoint.tensor(f"{name}.weight", size, size))
        if not needs_bias:
            return weight, None
        return weight, place.put(checkpoint.tensor(f"{name}.bias", size))

    def lm_head(stored: Tensor, name: str) -> Tensor:
        """Return the rows of the known tokens, of which a file may hold all."""
        if token_map is not None and len(stored) != len(token_map):
            stored = stored[token_map] if len(stored) == target.vocab_size else stored
        rows = target.vocab_size if token_map is None else len(token_map)
        if tuple(stored.shape) != (rows, target.hidden_size):
            raise ConfigError(
                f"{name} in {folder} is of shape {list(stored.shape)}; "
                f"{[rows, target.hidden_size]} follows from the target."
            )
        return place.put(stored if scale == 1.0 else stored * scale)

    blocks = [[layer(i, j) for j in range(num_layers)] for i in range(num_heads)]
    names = [prefix + layout.lm_head.format(i=i, n=num_layers) for i in range(num_heads)]
    if config.get("original_lm_head", False):  # one for all, which the file may leave out
        names = [name for name in (names[0], f"{prefix}lm_head.weight") if name in checkpoint][:1]
    lm_heads = [lm_head(checkpoint.tensor(name), name) for name in names]
    if not lm_heads:
        lm_heads = [lm_head(target.head(), "lm_head.weight")]
    # A map of the whole vocabulary says nothing.
    checkpoint.check_all_taken(ignored=[f"{prefix}token_map"], prefix=prefix)
    token_map = None if token_map is None else token_map.to(place.device)
    return MedusaHead(blocks, lm_heads, target.vocab_size, token_map)


def _find_heads(checkpoint: Checkpoint) -> tuple[_Layout, str, int, int]:
    """Return layout and prefix of the tensors' names, and the numbers of heads and layers."""
    for prefix in _PREFIXES:
        for layout in _LAYOUTS:
            spelt = re.compile(re.escape(prefix) + layout.layer_weight)
            found = [
                match.groups() for name in checkpoint.names if (match := spelt.fullmatch(name))
            ]
            if found:
                num_heads, num_layers = (
                    1 + max(map(int, each)) for each in zip(*found, strict=True)
                )
                return layout, prefix, num_heads, num_layers
    raise ConfigError(
        f"{checkpoint.folder} holds no Medusa heads: neither a tensor 0.0.linear.weight nor "
        "blocks.0.layers.0.weight."
    )
