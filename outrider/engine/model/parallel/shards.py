"""Linear layers whose weights `transformers` has sharded over ranks, for fused steps.

Megatron-LM's scheme (Shoeybi et al., arXiv 1909.08053): what follows a product split by outputs
stays with its rank, and a product split by inputs is summed over all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from outrider.engine.model.linear import Linear, pack_linear


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which shard of a model's weights this process has."""

    rank: int
    size: int

    def whole(self, weight: Tensor) -> Tensor:
        """All of a sharded weight, on every rank. Every rank calls this."""
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    def summed(self, linear: Linear) -> Linear:
        """Of a layer split by inputs."""
        return linear if self.size == 1 else SummedLinear(linear, self.rank == 0)

    def gathered(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A layer that every rank has all outputs of; weight [out, in] may be split by outputs."""
        if not isinstance(weight, DTensor):
            return pack_linear(weight, bias)
        return GatheredLinear(weight, bias, self.size)


WHOLE: Final = Sharding(0, 1)


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class SummedLinear:
    """`linear` of some of the inputs, summed over the ranks; a bias is the leader's alone."""

    def __init__(self, linear: Linear, leads: bool) -> None:
        self._linear = linear
        self._leads = leads

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self._linear(x, out)
        dist.all_reduce(y)
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)`; `residual`, which all ranks have, is overwritten."""
        y = self._linear.add(x, residual if self._leads else residual.zero_())
        dist.all_reduce(y)
        return y


class GatheredLinear:
    """Outputs of all ranks side by side. The last ranks may have fewer."""

    def __init__(self, weight: DTensor, bias: Tensor | None, size: int) -> None:
        self._size = size
        self._outputs = weight.shape[0]
        part = weight.to_local()
        missing = -(-self._outputs // size) - len(part)
        part_bias = None if bias is None else F.pad(local(bias), (0, missing))
        self._linear = pack_linear(F.pad(part, (0, 0, 0, missing)), part_bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [tokens, in] to [tokens, out], in `out` if given."""
        part = self._linear(x).contiguous()
        parts = part.new_empty(self._size, *part.shape)
        dist.all_gather(list(parts), part)
        y = parts.transpose(0, 1).flatten(1)[:, : self._outputs]
        return y.contiguous() if out is None else out.copy_(y)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)
