"""Layers of the heads, and attention over chains that begin at every position at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class BlockShape:
    """The sizes of a head's decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32. `offset` 1: the weight is stored less one."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (self.weight.float() + self.offset)).to(x.dtype)


class SwiGLU(nn.Module):
    """A gated MLP."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        size, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down_proj.weight)  # a fresh layer passes its input on

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


@dataclass
class ChainContext:
    """Keys and values of all steps so far of chains that begin at every row at once.

    Row p of step k belongs to the chain that began at the true row p - k. Row p sees the true rows
    up to p - k (step 0) and, of each later step j up to its own, the one row p - k + j of its
    chain. Serving does the same, since true rows overwrite the rows of rejected drafts. (EAGLE-3's
    training-time test, arXiv 2503.01840, section 3.2.)
    """

    keys: list[Tensor] = field(default_factory=list)  # [rows, heads, length, head_dim] by step
    values: list[Tensor] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add a step's keys and values, and return the attention of its queries."""
        self.keys.append(key)
        self.values.append(value)
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mask = chain_mask(query.shape[-2], len(self.keys), query.device)
        return F.scaled_dot_product_attention(
            query, torch.cat(self.keys, -2), torch.cat(self.values, -2), attn_mask=mask
        )


def chain_mask(length: int, num_steps: int, device: torch.device) -> Tensor:
    """Return the rows that the last step's rows see: bool `[length, num_steps * length]`."""
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None]
    last = num_steps - 1
    steps = [column <= row - last]
    steps += [column == row - last + step for step in range(1, num_steps)]
    return torch.cat(steps, -1)


class ChainAttention(nn.Module):
    """Grouped-query attention of a head, over a `ChainContext`.

    `gated` is Qwen3-Next's: each head's query comes with a gate for its output, and queries and
    keys are normed (weights stored less one).
    """

    def __init__(self, input_size: int, shape: BlockShape, gated: bool = False) -> None:
        super().__init__()
        self.shape, self.gated = shape, gated
        width = shape.num_heads * shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, width * (2 if gated else 1), bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        nn.init.zeros_(self.o_proj.weight)
        if gated:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, offset=1.0)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, offset=1.0)

    def forward(self, x: Tensor, context: ChainContext) -> Tensor:
        """Map `[rows, length, input_size]` to `[rows, length, hidden_size]` at positions p."""
        rows, length, _ = x.shape
        shape = self.shape
        query = self.q_proj(x).view(rows, length, shape.num_heads, -1)
        key = self.k_proj(x).view(rows, length, shape.num_kv_heads, -1)
        value = self.v_proj(x).view(rows, length, shape.num_kv_heads, -1)
        gate = None
        if self.gated:
            query, gate = query.chunk(2, -1)
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (rotate(t.transpose(1, 2), shape.rope_theta) for t in (query, key))
        group = shape.num_heads // shape.num_kv_heads
        key = key.repeat_interleave(group, 1)
        value = value.transpose(1, 2).repeat_interleave(group, 1)
        y = context.attend(query, key, value).transpose(1, 2)
        if gate is not None:
            y = y * torch.sigmoid(gate)
        out: Tensor = self.o_proj(y.reshape(rows, length, -1))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP; the caller applies the norm before attention."""

    def __init__(self, input_size: int, shape: BlockShape, gated: bool = False) -> None:
        super().__init__()
        offset = 1.0 if gated else 0.0
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps, offset)
        self.self_attn = ChainAttention(input_size, shape, gated)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps, offset)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, residual: Tensor, context: ChainContext) -> Tensor:
        """Attend from `x`, which is normed, and add to `residual`; the result is not normed."""
        y = residual + self.self_attn(x, context)
        out: Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out


def rotate(x: Tensor, theta: float, positions: Tensor | None = None) -> Tensor:
    """Apply rotary position embedding, halves convention, to `[..., length, head_dim]`.

    `positions [length]` are 0, 1, ... by default.
    """
    length, dim = x.shape[-2:]
    if positions is None:
        positions = torch.arange(length, device=x.device)
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim
    angles = torch.outer(positions.float(), theta**-steps)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def shift_rows(x: Tensor, count: int = 1) -> Tensor:
    """Move row p to row p + count: `[rows, length, ...]`; the first rows are zero."""
    if count == 0:
        return x
    return torch.cat((torch.zeros_like(x[:, :count]), x[:, :-count]), 1)
