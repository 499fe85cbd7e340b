"""DFlash straight from its description: whole texts in float64, with every mask written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints.eagle_reference import doubled, mlp, rms


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate [n, heads, dim] by position, the halves of a head as pairs."""
    dim = x.shape[-1]
    rates = theta ** (-torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    angles = positions.to(x.dtype)[:, None, None] * rates
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        dim=-1,
    )


def sees(query: int, key: int, start: int, *, causal: bool, window: int | None) -> bool:
    """Return whether the block's token at `query` sees position `key`; the block is at `start`.

    Positions before the block are context.
    """
    if key > query and (causal or key < start):
        return False
    return window is None or abs(query - key) < window


def dflash(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    features: Tensor,
    block: Tensor,
    *,
    causal: Sequence[bool],
    windows: Sequence[int | None],
) -> Tensor:
    """Return the last layer's normed outputs of a block's tokens [m, hidden].

    `features` [n, width] are the target's states of positions 0 to n - 1, `block` [m, hidden] the
    embeddings of the tokens at n, n + 1, ...
    """
    t, eps, dim = doubled(tensors), config["rms_norm_eps"], config["head_dim"]
    n, m = len(features), len(block)
    context = rms(features.double() @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
    at, x = torch.arange(n + m), block.double()
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    for i in range(config["num_hidden_layers"]):
        prefix = f"layers.{i}."
        own = f"{prefix}self_attn."
        normed = rms(x, t[f"{prefix}input_layernorm.weight"], eps)
        rows = torch.cat((context, normed))
        q = (normed @ t[f"{own}q_proj.weight"].T).view(m, -1, dim)
        k = (rows @ t[f"{own}k_proj.weight"].T).view(n + m, -1, dim)
        v = (rows @ t[f"{own}v_proj.weight"].T).view(n + m, -1, dim)
        q = turn(rms(q, t[f"{own}q_norm.weight"], eps), at[n:], config["rope_theta"])
        k = turn(rms(k, t[f"{own}k_norm.weight"], eps), at, config["rope_theta"])
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        seen = torch.tensor(
            [
                [sees(query, key, n, causal=causal[i], window=windows[i]) for key in range(n + m)]
                for query in range(n, n + m)
            ]
        )
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).reshape(m, -1)
        a = x + out @ t[f"{own}o_proj.weight"].T
        x = a + mlp(a, t, prefix, eps)
    return rms(x, t["norm.weight"], eps)
