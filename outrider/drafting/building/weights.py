"""What every method with weights needs: a device, and what to compute in."""

from __future__ import annotations

from typing import Final

import torch

from outrider.drafting.building.config import ModelConfig
from outrider.errors import ConfigError

PAGE_SIZE: Final = 16


def prepare_device(method: ModelConfig) -> None:
    """Before anything is loaded. Raises `ConfigError` if there is no such device."""
    torch.set_num_threads(method.threads)
    if method.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device.")


def choose_dtype(method: ModelConfig, *, on_cpu: torch.dtype) -> torch.dtype:
    """What the method is told to compute in; else, as drafts change no text, what is fastest."""
    if method.dtype is None:
        return torch.bfloat16 if method.device == "cuda" else on_cpu
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[method.dtype]
