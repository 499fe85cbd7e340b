"""Device, dtype and constraint masks of methods with weights."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from outrider.drafting.building.config import ModelConfig, Say
from outrider.drafting.draft_model.masks import DraftMasks
from outrider.engine.sampling.constraint import ConstraintCompiler
from outrider.errors import ConfigError
from outrider.models.eos import read_eos_token_ids

PAGE_SIZE: Final = 16


def prepare_device(method: ModelConfig) -> None:
    """Set torch up before anything is loaded. Raises `ConfigError` if there is no such device."""
    torch.set_num_threads(method.threads)
    if method.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device.")


def choose_dtype(method: ModelConfig, *, on_cpu: torch.dtype) -> torch.dtype:
    """Return the configured dtype, else the fastest: drafts change no text."""
    if method.dtype is None:
        return torch.bfloat16 if method.device == "cuda" else on_cpu
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[method.dtype]


def load_masks(folder: Path, vocab_size: int, say: Say) -> DraftMasks | None:
    """Return masks for the tokenizer in `folder`; None, and say why, if it cannot be used."""
    try:
        compiler = ConstraintCompiler.load(folder, vocab_size, read_eos_token_ids(folder))
    except ConfigError as error:
        say(f"constrained requests are drafted for without masks. {error.message}")
        return None
    return DraftMasks(compiler)
