"""Refuse a model's folder on this machine by its files, before a service loads or listens.

It reads JSON and headers and needs no torch, so a service that cannot start ends at once. A model
that is still to be downloaded passes.
"""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ConfigError
from outrider.models.eos import read_eos_token_ids
from outrider.models.files import read_json
from outrider.models.resolve import find_local
from outrider.models.tokenizer import Tokenizer
from outrider.models.weight_files import check_folder, check_is_folder, read_headers, shards


def check_target(name: str) -> None:
    """Check a language model that is to be served. Raises `ConfigError`."""
    folder = find_local(name, "target")
    if folder is not None:
        check_is_folder(folder)
        _check_tokenizer(folder)
        check_folder(folder)
        read_eos_token_ids(folder)


def check_draft_model(name: str) -> None:
    """Check a language model that is to draft. Raises `ConfigError`."""
    folder = find_local(name, "draft")
    if folder is not None:
        check_folder(folder)


def check_module(name: str, role: str, target: str) -> None:
    """Check a module that reads the states of `target`. Raises `ConfigError`."""
    folder, target_folder = find_local(name, role), find_local(target, "target")
    if target_folder is not None:
        check_is_folder(target_folder)
    if folder is not None:
        check_is_folder(folder)
        read_json(folder / "config.json")
        read_headers(folder, shards(folder) or [p.name for p in folder.glob("*.safetensors")])


def _check_tokenizer(folder: Path) -> None:
    """Raise `ConfigError` for a tokenizer whose tokens the model does not all know.

    Special tokens are left out: the tokenizers of small members of a family may have those of
    larger ones. A prompt that names one is refused by itself.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    needed = Tokenizer.load(folder).needed_vocab_size
    fields = read_json(folder / "config.json")
    nested = fields.get("text_config")
    known = fields.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    if isinstance(known, int) and known < needed:
        raise ConfigError(
            f"The tokenizer in {folder} has tokens up to id {needed - 1}, but the model's "
            f"vocab_size is {known}: use the tokenizer that the model was trained with."
        )
