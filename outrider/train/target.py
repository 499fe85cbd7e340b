"""The frozen target: its states and logits over windows of text, and its own continuations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from outrider.errors import ConfigError

_SETTINGS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)


@dataclass(frozen=True)
class TargetBatch:
    """Windows of `length` + 1 tokens, with the target's states and logits."""

    token_ids: Tensor  # [rows, length + 1]
    layers: Tensor  # [rows, length + 1, hidden_size * len(layers)]: states that enter `layers`
    hidden: Tensor  # [rows, length + 1, hidden_size]: after the final norm
    logits: Tensor  # [rows, length + 1, vocab_size]


class Target:
    """A `transformers` causal LM that is read, never trained."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def embedding(self) -> Tensor:
        """`[vocab_size, hidden_size]`, not as a parameter, so that no head trains it."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def head(self) -> Tensor:
        """`[vocab_size, hidden_size]`."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    @torch.no_grad()
    def read(self, token_ids: Tensor, layers: tuple[int, ...]) -> TargetBatch:
        """Run whole windows; `layers` count as Hugging Face's `hidden_states`."""
        found = self.model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        states: tuple[Tensor, ...] = found.hidden_states
        joined = [states[layer] for layer in layers] or [states[-1][..., :0]]
        return TargetBatch(token_ids, torch.cat(joined, -1), states[-1], found.logits)

    @torch.no_grad()
    def logits(self, token_ids: Tensor) -> Tensor:
        """Return `[rows, n, vocab_size]` of tokens `[rows, n]`."""
        logits: Tensor = self.model(input_ids=token_ids, use_cache=False).logits
        return logits

    def check_widths(self) -> None:
        """Raise `ConfigError` where embeddings are narrower than states: no head fits both."""
        width, size = self.embedding.shape[-1], self.config.hidden_size
        if width != size:
            raise ConfigError(
                f"The target's embeddings have {width} values, its layers hidden_size {size}: only "
                "draft_model can be trained for it."
            )


def load_target(folder: Path, device: torch.device, dtype: torch.dtype) -> Target:
    """Read a Hugging Face folder.

    Raises `ConfigError` unless it holds a causal LM whose config has what training needs.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"--target {folder} cannot be read: {error}") from error
    target = Target(model.to(device))
    for name in _SETTINGS:
        if getattr(target.config, name, None) is None:
            raise ConfigError(
                f"--target {folder}: its config has no {name}, without which nothing can be "
                "trained for it."
            )
    return target


def gumbel_noise(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return noise in the shape of `like` that makes the argmax of logits a sample."""
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
    """Continue equally long prompts; a row of temperature 0 is greedy.

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
    """Continue prompts, every other one greedily and the rest at T = 1; int32 on the host."""
    generator = torch.Generator(target.device).manual_seed(seed)
    parts = []
    for part in torch.split(prompts, rows_at_once):
        temperatures = (torch.arange(len(part), device=target.device) % 2).float()
        rows = continue_rows(target, part.to(target.device), num_tokens, temperatures, generator)
        parts.append(rows.to("cpu", torch.int32))
    return torch.cat(parts)
