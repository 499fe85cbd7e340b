"""Finds the folders of a draft module and its target. Knows nothing of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from outrider.models.resolve import resolve_model
from outrider.models.weight_files import read_index

EMBEDDINGS: Final = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
    *("model.decoder.embed_tokens.weight", "decoder.embed_tokens.weight"),  # OPT
    *("transformer.wte.weight", "wte.weight"),  # GPT-2
    "gpt_neox.embed_in.weight",
)
"""Names that targets give their embedding."""
HEADS: Final = (
    *("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"),
    "embed_out.weight",  # GPT-NeoX
)
"""Names that targets give their output layer."""
MODULE_FILES: Final = ("*.safetensors", "*.bin", "*.pt")
"""Weights of modules, which are published in all of these formats."""


def resolve_module(name: str, role: str, target: str) -> tuple[Path, Path]:
    """Return the folders of a module and of its target, as `resolve_model` finds them.

    A target is downloaded as far as modules share its tensors. Raises `ConfigError`.
    """
    folder = resolve_model(name, role, weights=MODULE_FILES)
    index = resolve_model(target, "target", tokenizer_only=True)
    return folder, resolve_model(target, "target", weights=shared_files(index))


def shared_files(folder: Path) -> tuple[str, ...]:
    """Return the files of a target that hold the tensors modules share with it.

    Raises `ConfigError` for a broken index.
    """
    index = read_index(folder)
    shared = {index[name] for name in (*EMBEDDINGS, *HEADS) if name in index}
    return tuple(sorted(shared)) or ("*.safetensors",)
