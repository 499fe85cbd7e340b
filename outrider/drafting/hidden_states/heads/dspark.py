"""DSpark (DeepSpec): DFlash whose slots know the token before, and how sure they are.

A slot's logits get a bias of low rank by the token before it, or (`rnn`) by all tokens of its path
up to there, so the tokens of a path are chosen left to right, without another forward. The anchor's
own slot guesses the first token, unless config.json says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.confidence import by_row, confidences_of_log_probs
from outrider.drafting.hidden_states.heads.base import HeadSetup, Place, spread
from outrider.drafting.hidden_states.heads.dflash import DFlashHead
from outrider.drafting.hidden_states.heads.dflash_format import DFlashFormat
from outrider.drafting.hidden_states.trees import (
    Guess,
    TargetDraws,
    guess_paths,
    max_trees,
    trees_of_paths,
)
from outrider.drafting.likeliest import BiasedLogits, dense
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import Use
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.drafting.cpu.biased_chains import BiasedChains

_TYPES = ("vanilla", "gated", "rnn")


class DSparkFormat(DFlashFormat):
    """A checkpoint of a DSpark module. Raises `ConfigError`, naming what does not fit."""

    kind: ClassVar[str] = "DSpark"
    samples_from_anchor: ClassVar[bool] = True


class DSparkHead(DFlashHead):
    """A module of DSpark."""

    format = DSparkFormat
    follows_paths: ClassVar[bool] = True

    def __init__(self, found: DFlashFormat, setup: HeadSetup) -> None:
        super().__init__(found, setup)
        place = setup.place
        self._before = _markov(found, place, self.vocab_size, self._num_known, self._target_ids)
        self._confidence: tuple[Tensor, Tensor] | None = None
        name = found.name("confidence_head.proj.weight")
        if name in found.checkpoint:
            hidden, rank = self.state_size, self._before.rank if self._before else 0
            width = found.checkpoint.stored(name).shape[-1]
            if width != hidden:  # else it reads the token before as well, or is refused
                width = hidden + rank
            bias = found.checkpoint.tensor(found.name("confidence_head.proj.bias"), 1)
            weight = found.checkpoint.tensor(name, 1, width)
            # One output is a product that CPUs are slow at in bfloat16.
            exact = torch.promote_types(place.dtype, torch.float32)
            self._confidence = place.put(weight).to(exact), place.put(bias).to(exact)
        self._chains = None if self._before is None else self._before.chains
        if self._before is not None and self._chains is not None:
            self.uses = (*self.uses, Use(self._before.product))

    def max_rows(self, depth: int, width: int) -> int:
        # All places' logits are of known tokens, in the module's dtype and without noise.
        of_places = (
            max_trees(min(depth, self.max_depth), self._num_known) * 8 // self.dtype.itemsize
        )
        return min(max_trees(width, self.vocab_size), of_places)

    def guess(
        self, states: Tensor, tokens: Tensor, draws: TargetDraws, depth: int, width: int
    ) -> Tensor:
        """Return what `guess_paths` does; of chains also log confidences: [n, 4, depth]."""
        normed, known = self._slots(states[:, :depth])
        confidence = self._confidence if width == 1 else None
        if confidence is not None and self._chains is not None:
            return self._chains.draw(normed, known, tokens, draws.batch, confidence)

        def step(paths: Tensor, last: Tensor, place: int) -> tuple[Tensor, Tensor | BiasedLogits]:
            return self._biased(paths, normed[:, place], known[:, place], last)

        found = guess_paths(step, self._no_tokens(normed), tokens, draws, depth, width)
        if confidence is None:
            return found
        # Log probabilities would tell nothing more.
        before = torch.cat((tokens[:, None], found[:, 0, :-1]), dim=1)
        sure = self._log_confidence(normed, before).float().view(torch.int32)
        return torch.cat((found, sure[:, None]), dim=1)

    def trees(self, guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Guess]:
        # One node alone may be drawn as a chain, so it tells the same either way: nothing.
        return [
            guess if len(guess.tokens) > 1 else guess._replace(confidences=b"")
            for guess in trees_of_paths(guesses, sizes)
        ]

    def chains(self, guesses: Tensor) -> Tensor:
        return guesses[:, 0]

    def confidences(self, guesses: NDArray[np.int32]) -> list[bytes]:
        if guesses.shape[1] > 3:  # chains, whose confidences `guess` added
            steps = guesses[:, 3].copy().view(np.float32)
            return by_row(confidences_of_log_probs(steps), [steps.shape[1]] * len(steps))
        scores = guesses[:, 2].copy().view(np.float32)
        steps = np.diff(scores, axis=1, prepend=np.float32(0))
        told = confidences_of_log_probs(np.minimum(steps, 0))
        return by_row(told, [steps.shape[1]] * len(steps))

    def begin(self, states: Tensor) -> Tensor:
        """Return outputs with a place behind each for the state of the path up to it."""
        path = self._no_tokens(states)[:, None].expand(-1, states.shape[1], -1)
        return torch.cat((states, path), dim=-1)

    def step(self, states: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        outputs, paths = states[..., : self.state_size], states[..., self.state_size :]
        normed, known = self._slots(outputs[:, depth : depth + 1])
        path, logits = self._biased(paths[:, depth], normed[:, 0], known[:, 0], tokens)
        paths[:, depth + 1 : depth + 2] = path[:, None]
        return states, dense(logits)[:, 0]

    def _no_tokens(self, outputs: Tensor) -> Tensor:
        """Return the state of paths without tokens: [n, width], the width perhaps 0."""
        return outputs.new_zeros(len(outputs), self._before.state_size if self._before else 0)

    def _slots(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return normed outputs and logits without bias: [n, depth, hidden], [n, depth, known]."""
        rows, depth, _ = outputs.shape
        flat = outputs.reshape(rows * depth, -1)
        normed = self._ops.rms_norm(flat, self._norm, self._shape.eps)
        return normed.view(rows, depth, -1), self._known_logits(flat).view(rows, depth, -1)

    def _biased(
        self, paths: Tensor, normed: Tensor, known: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor | BiasedLogits]:
        """Return the states of paths on which `tokens` [n * m] follow, and logits of what follows.

        `normed` [n, hidden] and `known` [n, known] are a slot's outputs and logits without bias.
        """
        num_paths = len(tokens) // len(known)  # of a row
        if self._before is None:
            spread_out = spread(known, self._target_ids, self.vocab_size)
            return paths, spread_out[:, None].expand(-1, num_paths, -1)
        markov, ids, vocab_size = self._before, self._target_ids, self.vocab_size
        paths, table, rows = markov.advance(paths, tokens, normed)

        def sums() -> Tensor:
            own = known[:, None].expand(-1, num_paths, -1).flatten(0, 1).contiguous()
            biased = spread(markov.product.add(F.embedding(rows, table), own), ids, vocab_size)
            return biased.view(len(known), num_paths, -1)

        return paths, BiasedLogits(known[:, None], ids, (table, rows, markov.weight), sums)

    def _log_confidence(self, normed: Tensor, before: Tensor) -> Tensor:
        """Return log P(accepted, given that those before are) [n, depth]."""
        assert self._confidence is not None
        weight, bias = self._confidence
        if weight.shape[-1] > normed.shape[-1]:
            assert self._before is not None
            normed = torch.cat((normed, F.embedding(before, self._before.embedding)), dim=-1)
        return F.logsigmoid(F.linear(normed.to(weight.dtype), weight, bias))[..., 0]


class _Markov:
    """The bias of a slot's logits by the tokens before: a product of low rank."""

    def __init__(
        self, kind: str, embedding: Tensor, weight: Tensor, product: Linear, joint: Linear | None
    ) -> None:
        """`product` is with `weight`, `joint` the gate of `gated`, or what makes state and bias."""
        self._kind, self.product, self._joint = kind, product, joint
        self.embedding, self.weight, self.rank = embedding, weight, weight.shape[1]
        self.state_size = self.rank if kind == "rnn" else 0
        self.chains: BiasedChains | None = None  # a faster way to draw chains, on a CPU

    def advance(
        self, paths: Tensor, tokens: Tensor, normed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states of paths after tokens [m], and a table and its rows for the product.

        `paths` [m, state_size] are the states before, `normed` [n, hidden] the outputs of a slot,
        whose rows have as many paths each.
        """
        if self._joint is None:
            return paths, self.embedding, tokens
        normed = normed.repeat_interleave(len(tokens) // len(normed), dim=0)
        before = F.embedding(tokens, self.embedding)
        if self._kind == "gated":
            before = torch.sigmoid(self._joint(torch.cat((normed, before), dim=-1))) * before
        else:
            parts = self._joint(torch.cat((paths, before, normed), dim=-1)).chunk(3, dim=-1)
            paths = torch.lerp(torch.tanh(parts[1]), paths, torch.sigmoid(parts[0]))
            before = torch.tanh(parts[2])
        return paths, before, torch.arange(len(before), device=before.device)


def _markov(
    found: DFlashFormat, place: Place, vocab_size: int, num_known: int, ids: Tensor | None
) -> _Markov | None:
    checkpoint, config = found.checkpoint, found.checkpoint.config
    name = found.name("markov_head.markov_w1.weight")
    if name not in checkpoint:
        return None
    kind = str(config.get("markov_head_type", "vanilla")).lower()
    if kind not in _TYPES:
        raise ConfigError(
            f"config.json in {checkpoint.folder}: markov_head_type {kind!r} is not supported; "
            f"known are {', '.join(_TYPES)}."
        )
    rank = checkpoint.stored(name).shape[-1]
    embedding = place.put(checkpoint.tensor(name, vocab_size, rank))
    product = checkpoint.tensor(found.name("markov_head.markov_w2.weight"), num_known, rank)
    hidden = checkpoint.stored(found.name("norm.weight")).shape[0]
    joint: tuple[Tensor, Tensor] | None = None
    if kind != "vanilla":
        layer = found.name(f"markov_head.{'gate' if kind == 'gated' else 'joint'}_proj.")
        size = (rank, hidden + rank) if kind == "gated" else (3 * rank, 2 * rank + hidden)
        joint = (
            checkpoint.tensor(f"{layer}weight", *size),
            checkpoint.tensor(f"{layer}bias", size[0]),
        )
    weight = place.put(product).contiguous()
    joined = None if joint is None else place.linear(*joint)
    markov = _Markov(kind, embedding, weight, place.linear(product), joined)
    on_cpu = place.device.type == "cpu" and place.dtype in (torch.float32, torch.bfloat16)
    if kind != "gated" and on_cpu:
        # Imported here: on a GPU nothing needs Numba.
        from outrider.drafting.cpu.biased_chains import BiasedChains

        put = None if joint is None else (place.put(joint[0]), place.put(joint[1]))
        markov.chains = BiasedChains(embedding, weight, put, ids, linear=markov.product)
    return markov
