"""A Llama model in plain PyTorch, with the parameter names of `LlamaForCausalLM`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import ModelConfig

Cache = list[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * self.weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query causal attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: tuple[Tensor, Tensor] | None = None,
        start: int = 0,
    ) -> Tensor:
        """Attend; with a cache, to everything before `start` as well."""
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            cache[0][:, :, start : start + length] = k
            cache[1][:, :, start : start + length] = v
            k, v = cache[0][:, :, : start + length], cache[1][:, :, : start + length]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, up, down."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: tuple[Tensor, Tensor] | None = None,
        start: int = 0,
    ) -> Tensor:
        """Pre-norm residual layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, start)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Decoder(nn.Module):
    """Embeddings, layers and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)


class Llama(nn.Module):
    """The whole model; the output projection is the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(config.max_positions).float(), config.rope_theta**-steps)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / ((2 * config.layers) ** 0.5 if deep else 1))

    def hidden(self, ids: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Final hidden states."""
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.bfloat16)
        cos = self.cos[start : start + ids.shape[1]].to(x.dtype)
        sin = self.sin[start : start + ids.shape[1]].to(x.dtype)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, None if cache is None else cache[index], start)
        y: Tensor = self.model.norm(x)
        return y

    def forward(self, ids: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Logits of every position."""
        return F.linear(self.hidden(ids, cache, start), self.model.embed_tokens.weight)

    def new_cache(self, rows: int, length: int) -> Cache:
        """An empty key/value cache."""
        weight = self.model.embed_tokens.weight
        shape = (rows, self.config.kv_heads, length, self.config.head_dim)

        def empty() -> Tensor:
            return torch.empty(shape, dtype=weight.dtype, device=weight.device)

        return [(empty(), empty()) for _ in range(self.config.layers)]


@torch.no_grad()
def generate(
    model: Llama,
    prompts: Tensor,
    new_tokens: int,
    temperature: Tensor | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Continue equally long prompts; rows with temperature 0 (or all, if None) are greedy.

    `noise` fixes the Gumbel noise, `[new_tokens, vocab]` or `[new_tokens, rows, vocab]`.
    """
    rows, length = prompts.shape
    cache = model.new_cache(rows, length + new_tokens)
    out = torch.empty((rows, length + new_tokens), dtype=torch.long, device=prompts.device)
    out[:, :length] = prompts
    chunk = max(1, 4_000_000 // (length * 64))
    last = torch.cat(
        [
            model.hidden(
                prompts[i : i + chunk],
                [(k[i : i + chunk], v[i : i + chunk]) for k, v in cache],
            )[:, -1:]
            for i in range(0, rows, chunk)
        ]
    )
    for step in range(new_tokens):
        logits = F.linear(last, model.model.embed_tokens.weight)[:, 0].float()
        if temperature is not None:
            scale = temperature[:, None]
            gumbel = (
                noise[step] if noise is not None else -torch.empty_like(logits).exponential_().log()
            )
            logits = logits + scale * gumbel
        token = logits.argmax(-1, keepdim=True)
        out[:, length + step] = token[:, 0]
        if step + 1 < new_tokens:
            last = model.hidden(token, cache, length + step)
    return out
