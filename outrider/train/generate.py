"""The target's own continuations: what drafts are made for, and so what they best learn from."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.train.target import Target


def gumbel_noise(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """What added to logits makes their argmax a sample, in the shape of `like`."""
    uniform = torch.rand(like.shape, generator=generator, device=like.device)
    return -(-uniform.clamp_(min=1e-20).log()).log()


@torch.no_grad()
def continue_rows(
    target: Target,
    prompts: Tensor,
    num_tokens: int,
    temperatures: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continues equally long prompts; a row of temperature 0 is greedy.

    `prompts [rows, length]`, `temperatures [rows]`; returns `[rows, length + num_tokens]`.
    """
    out = torch.empty((len(prompts), num_tokens), dtype=torch.long, device=prompts.device)
    cache, ids = DynamicCache(), prompts
    greedy = not bool((temperatures > 0).any())
    for position in range(num_tokens):
        result = target.model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        logits = result.logits[:, -1].float()
        if not greedy:
            logits = logits + temperatures[:, None] * gumbel_noise(logits, generator)
        ids = logits.argmax(-1, keepdim=True)
        out[:, position] = ids[:, 0]
    return torch.cat((prompts, out), 1)


def responses(
    target: Target, prompts: Tensor, num_tokens: int, rows_at_once: int, seed: int
) -> Tensor:
    """Continues prompts, every other one greedily and the rest at T = 1; int32 on the host."""
    generator = torch.Generator(target.device).manual_seed(seed)
    parts = []
    for part in torch.split(prompts, rows_at_once):
        temperatures = (torch.arange(len(part), device=target.device) % 2).float()
        rows = continue_rows(target, part.to(target.device), num_tokens, temperatures, generator)
        parts.append(rows.to("cpu", torch.int32))
    return torch.cat(parts)
