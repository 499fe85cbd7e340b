"""The frozen target: its states and logits over windows of text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from outrider.errors import ConfigError

_SETTINGS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
_BLOCKS = ("layers", "h", "blocks")  # names of the decoder's list of layers
_FINAL = -1  # among layers: what the final norm makes of the last one's output


@dataclass(frozen=True)
class TargetBatch:
    """Windows of `length` + 1 tokens, and what the target makes of them."""

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
        self.decoder: Any = model.get_decoder()
        self._states: dict[int, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = self.model.device
        return device

    @property
    def embedding(self) -> Tensor:
        """`[vocab_size, hidden_size]`. No parameter: a head that keeps it does not train it."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def head(self) -> Tensor:
        """`[vocab_size, hidden_size]`."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    @torch.no_grad()
    def read(self, token_ids: Tensor, layers: tuple[int, ...]) -> TargetBatch:
        """One forward of whole windows; `layers` count as Hugging Face's `hidden_states`."""
        hooks = [self._hook(layer) for layer in layers]
        hooks.append(self.decoder.register_forward_hook(self._at_the_end))
        try:
            # Not the head alone: some models scale its logits, or cap them.
            logits = self.logits(token_ids)
        finally:
            for hook in hooks:
                hook.remove()
        states = [self._states.pop(layer) for layer in layers]
        hidden = self._states.pop(_FINAL)
        joined = torch.cat(states, -1) if states else hidden[..., :0]
        return TargetBatch(token_ids, joined, hidden, logits)

    @torch.no_grad()
    def logits(self, token_ids: Tensor) -> Tensor:
        """`[rows, n, vocab_size]` of tokens `[rows, n]`."""
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

    def _at_the_end(self, _: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self._states[_FINAL] = output[0]

    def _hook(self, layer: int) -> Any:
        blocks = next((getattr(self.decoder, n) for n in _BLOCKS if hasattr(self.decoder, n)), None)
        if blocks is None:
            kind = type(self.decoder).__name__
            raise ConfigError(f"The layers of a {kind} are not found: eagle3 cannot be trained.")

        def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[layer] = args[0] if args else kwargs["hidden_states"]

        def leaving(_: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._states[layer] = output[0] if isinstance(output, tuple) else output

        if layer == len(blocks):
            return blocks[-1].register_forward_hook(leaving)
        return blocks[layer].register_forward_pre_hook(entering, with_kwargs=True)


def load_target(folder: Path, device: torch.device, dtype: torch.dtype) -> Target:
    """Read a Hugging Face folder. Raises `ConfigError` unless it holds a causal LM whose config
    says what training asks for.
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
