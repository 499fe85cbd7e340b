"""Linear layers whose weights `transformers` has sharded over ranks, for fused steps.

The scheme is Megatron-LM's (Shoeybi et al., arXiv 1909.08053): a product split by outputs needs no
communication, and a product split by inputs is summed over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from outrider.engine.layers.linear import Linear
from outrider.engine.model.pack import pack_linear


@dataclass(frozen=True, slots=True)
class Sharding:
    """The shard of a model's weights in this process."""

    rank: int
    size: int

    def whole(self, weight: Tensor) -> Tensor:
        """Gather a sharded weight. Every rank calls this."""
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    def summed(self, linear: Linear) -> Linear:
        """Sum a layer that is split by inputs."""
        return linear if self.size == 1 else SummedLinear(linear, self.rank == 0)

    def gathered(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return a layer with all outputs on every rank; weight may be split by outputs."""
        if not isinstance(weight, DTensor):
            return pack_linear(weight, bias)
        return GatheredLinear(weight, bias, self.size)


WHOLE: Final = Sharding(0, 1)


def local(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class SummedLinear:
    """A layer of some of the inputs, summed over ranks; only the leader adds the bias."""

    def __init__(self, linear: Linear, leads: bool) -> None:
        self._linear = linear
        self._leads = leads

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self._linear(x, out)
        dist.all_reduce(y)
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + self(x)`; overwrites `residual`, which all ranks have."""
        y = self._linear.add(x, residual if self._leads else residual.zero_())
        dist.all_reduce(y)
        return y


class GatheredLinear:
    """The concatenated outputs of all ranks. The last ranks may have fewer."""

    def __init__(self, weight: DTensor, bias: Tensor | None, size: int) -> None:
        self._size = size
        self._outputs = weight.shape[0]
        part = weight.to_local()
        missing = -(-self._outputs // size) - len(part)
        part_bias = None if bias is None else F.pad(local(bias), (0, missing))
        self._linear = pack_linear(F.pad(part, (0, 0, 0, missing)), part_bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map x [tokens, in] to [tokens, out], in `out` if it is given."""
        part = self._linear(x).contiguous()
        parts = part.new_empty(self._size, *part.shape)
        dist.all_gather(list(parts), part)
        y = parts.transpose(0, 1).flatten(1)[:, : self._outputs]
        return y.contiguous() if out is None else out.copy_(y)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)
