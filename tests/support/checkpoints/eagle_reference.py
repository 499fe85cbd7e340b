"""EAGLE and EAGLE-3 straight from their formulas, in float64: whole texts, no cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Row = tuple[Tensor, Tensor]
"""Logits over the module's own vocabulary, and the state for the next row."""
Module = Callable[[Tensor, Tensor], list[Row]]
"""Tokens t_1 ... t_n int64 [n] and states of positions 0 ... n - 1 [n, hidden]: every row's."""


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def attention(u: Tensor, t: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any]) -> Tensor:
    """Causal attention over rows u [n, width], rotary positions 0 ... n - 1."""
    n, dim = len(u), config["head_dim"]
    theta = config.get("rope_theta", 10000.0)
    heads = config["num_attention_heads"]
    group = heads // config["num_key_value_heads"]
    q, k, v = (u @ t[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = (x.view(n, -1, dim).transpose(0, 1) for x in (q, k, v))  # [heads, n, dim]
    angles = torch.arange(n, dtype=torch.float64)[:, None] * theta ** (
        -torch.arange(0, dim, 2, dtype=torch.float64) / dim
    )
    cos, sin = angles.cos(), angles.sin()

    def turn(x: Tensor) -> Tensor:
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    k, v = turn(k).repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = turn(q) @ k.transpose(1, 2) / dim**0.5
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v
    return out.transpose(0, 1).reshape(n, -1) @ t[f"{prefix}self_attn.o_proj.weight"].T


def mlp(x: Tensor, t: Mapping[str, Tensor], prefix: str, eps: float) -> Tensor:
    x = rms(x, t[f"{prefix}post_attention_layernorm.weight"], eps)
    gate, up = x @ t[f"{prefix}mlp.gate_proj.weight"].T, x @ t[f"{prefix}mlp.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ t[f"{prefix}mlp.down_proj.weight"].T


def doubled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}


def eagle(
    tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor, config: Mapping[str, Any]
) -> Module:
    """x = W_fc [e(t_{p+1}); h_p] + b; a = x + Attn(x); f = a + MLP(RMS(a)); logits = W_head f."""
    t, eps = doubled(tensors), config["rms_norm_eps"]

    def run(tokens: Tensor, states: Tensor) -> list[Row]:
        x = torch.cat((embedding.double()[tokens], states), dim=-1) @ t["fc.weight"].T
        x = x + t.get("fc.bias", torch.zeros(()))
        for i in range(config["num_hidden_layers"]):
            prefix = f"layers.{i}."
            u = rms(x, t[f"{prefix}input_layernorm.weight"], eps) if i else x
            a = x + attention(u, t, prefix, config)
            x = a + mlp(a, t, prefix, eps)
        return list(zip(x @ head.double().T, x, strict=True))

    return run


def eagle3(
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    head: Tensor,
    config: Mapping[str, Any],
    *,
    layer: str = "midlayer.",
    norm_before_residual: bool = False,
    norm_output: bool = False,
) -> Module:
    """u = [RMS(e); RMS(g)]; y = r + Attn(u); z = y + MLP(RMS(y)); logits = W_lm RMS(z)."""
    t, eps = doubled(tensors), config["rms_norm_eps"]

    def run(tokens: Tensor, states: Tensor) -> list[Row]:
        e = rms(embedding.double()[tokens], t[f"{layer}input_layernorm.weight"], eps)
        g = rms(states, t[f"{layer}hidden_norm.weight"], eps)
        residual = g if norm_before_residual else states
        y = residual + attention(torch.cat((e, g), dim=-1), t, layer, config)
        z = y + mlp(y, t, layer, eps)
        for i in range(1, config["num_hidden_layers"]):
            prefix = f"layers.{i}."
            u = rms(z, t[f"{prefix}input_layernorm.weight"], eps)
            y = z + attention(u, t, prefix, config)
            z = y + mlp(y, t, prefix, eps)
        normed = rms(z, t["norm.weight"], eps)
        return list(zip(normed @ head.double().T, normed if norm_output else z, strict=True))

    return run


def draft(
    run: Module, tokens: list[int], states: Tensor, num_steps: int, target_ids: Tensor | None = None
) -> tuple[list[int], list[Tensor]]:
    """A greedy draft after `tokens`, whose positions but the last have `states` [n - 1, hidden].

    Returns it with the logits of its steps. Everything is computed anew at every step.
    """
    tokens, drafted, seen = list(tokens), [], []
    for _ in range(num_steps):
        logits, state = run(torch.tensor(tokens[1:]), states)[-1]
        best = int(logits.argmax())
        token = best if target_ids is None else int(target_ids[best])
        states = torch.cat((states, state[None]))
        tokens.append(token)
        drafted.append(token)
        seen.append(logits)
    return drafted, seen
