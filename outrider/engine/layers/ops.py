"""The operations between the linear layers of a Llama, as few fused ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from outrider.engine.attention.base import AttentionParams, StepAttention
from outrider.engine.kv_cache.pools import LayerPool
from outrider.engine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Use:
    """A linear layer as a step calls it, for the autotuner.

    With a norm the call is `norm_linear` or `norm_gated`, else `Linear.add`, or the layer `alone`.
    """

    linear: Linear
    norm: Tensor | None = None  # [in]
    gated: bool = False
    alone: bool = False


class LlamaOps(Protocol):
    """Rounds where the modules of `transformers` round, so that texts stay equal in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x [tokens, hidden] over its root mean square, times weight [hidden]."""

    def qk_norm_(self, qkv: Tensor, weight: Tensor, eps: float) -> None:
        """Norm the query and key heads of qkv in place; weight [heads + kv_heads, head_dim]."""

    def rotate_and_store(self, qkv: Tensor, rope: Tensor, slots: Tensor, pool: LayerPool) -> Tensor:
        """Rotate queries and keys, store keys and values, and return the queries.

        qkv [tokens, (heads + 2 * kv_heads) * dim] may be overwritten; rope
        [tokens, 2, 2, dim / 2]: the cosines of both halves, then the sines as -sin, sin; slots
        int64 [tokens]. Returns [tokens, kv_heads, group, dim].
        """

    def store_context(
        self, keys_values: Tensor, rope: Tensor, slots: Tensor, pools: Sequence[LayerPool]
    ) -> None:
        """Rotate keys of several layers, and store keys and values.

        keys_values [tokens, 2 * layers * kv_heads * dim] may be overwritten and holds the keys of
        all layers first. rope and slots are those of `rotate_and_store`.
        """
        kv_heads, dim, _ = pools[0].shape
        tokens, layers = len(keys_values), len(pools)
        keys, values = keys_values.view(tokens, 2, layers, kv_heads, dim).unbind(1)
        halves = keys.reshape(tokens, layers * kv_heads, 2, dim // 2)
        rotated = halves * rope[:, 0:1] + halves.flip(2) * rope[:, 1:2]
        by_layer = rotated.view(tokens, layers, kv_heads, dim).unbind(1)
        for pool, key, value in zip(pools, by_layer, values.unbind(1), strict=True):
            pool.write(slots, key, value)

    def attend_new(
        self,
        qkv: Tensor,
        rope: Tensor,
        attention: StepAttention,
        pool: LayerPool,
        params: AttentionParams,
    ) -> Tensor:
        """Run `rotate_and_store` and then attention: [tokens, kv_heads, group, dim]."""
        query = self.rotate_and_store(qkv, rope, attention.batch.slot_mapping, pool)
        return attention.attend(query, pool, params)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Map [tokens, 2 * intermediate] to silu(gate) * up [tokens, intermediate]."""

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, linear: Linear, out: Tensor | None = None
    ) -> Tensor:
        """Return `linear` of x [tokens, hidden] normed, in `out` if it is given."""
        return linear(self.rms_norm(x, norm, eps), out)

    def norm_gated(self, x: Tensor, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """Return silu(gate) * up [tokens, intermediate] of x [tokens, hidden] normed."""
        return self.silu_mul(gate_up(self.rms_norm(x, norm, eps)))

    def mlp(self, x: Tensor, norm: Tensor, eps: float, gate_up: Linear, down: Linear) -> Tensor:
        """Return x + down(silu(gate) * up) of x [tokens, hidden] normed; x may be overwritten."""
        return down.add(self.norm_gated(x, norm, eps, gate_up), x)

    def tune(self, uses: Sequence[Use]) -> None:  # noqa: ARG002
        """Choose kernels for a step's linear layers, given once in their order."""
        return


class TorchOps(LlamaOps):
    """`LlamaOps` in plain torch operations: any device, any dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def qk_norm_(self, qkv: Tensor, weight: Tensor, eps: float) -> None:
        heads, dim = weight.shape
        qk = qkv[:, : heads * dim].view(-1, heads, dim)
        qk.copy_(F.rms_norm(qk, (dim,), None, eps).mul_(weight))

    def rotate_and_store(self, qkv: Tensor, rope: Tensor, slots: Tensor, pool: LayerPool) -> Tensor:
        tokens = len(qkv)
        kv_heads, dim, _ = pool.shape
        heads = qkv.view(tokens, -1, dim)
        rotated = heads[:, :-kv_heads].view(tokens, -1, 2, dim // 2)  # values are not rotated
        swapped = rotated.flip(2)
        rotated.mul_(rope[:, 0:1]).addcmul_(swapped, rope[:, 1:2])
        pool.write(slots, heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:])
        return heads[:, : -2 * kv_heads].view(tokens, kv_heads, -1, dim)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
