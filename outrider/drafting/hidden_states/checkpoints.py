"""Reads checkpoint folders tensor by tensor: those of draft modules, and what they share with the
target's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.engine.model.loader import read_text_config
from outrider.errors import ConfigError
from outrider.models.modules import EMBEDDINGS, HEADS
from outrider.models.resolve import TRAINING_STATE


def is_quantised(tensor: Tensor) -> bool:
    """Whether numbers are stored that mean nothing without factors beside them."""
    return not tensor.is_floating_point() or tensor.dtype.itemsize == 1


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def folder(self) -> Path: ...

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, *shape: int) -> Tensor:
        """As it is stored. Raises `ConfigError` unless it is there, in this shape."""
        ...


class Checkpoint:
    """A folder's config.json, and its tensors by name. Only what is asked for is loaded.

    Reads safetensors, or else what `torch.load` takes without running code (`*.bin`, `*.pt`).
    Where files are named `preferred`, up to the ending, it reads no others. Raises `ConfigError`
    for a folder that is none, and files that are broken.
    """

    def __init__(self, folder: Path, preferred: str = "*") -> None:
        self.folder = folder
        self.config = _read_config(folder)
        self._file_of: dict[str, Any] = {}  # of safetensors
        self._loaded: dict[str, Tensor] = {}  # of the others
        self._taken: set[str] = set()
        try:
            self._find(self._files(preferred) or self._files())
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(f"The weights in {folder} cannot be read: {error}") from error
        if not self._file_of and not self._loaded:
            raise ConfigError(f"{folder} holds no weights (*.safetensors, *.bin or *.pt).")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or name in self._loaded

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of) | frozenset(self._loaded)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """As `stored`. Raises `ConfigError` for quantised weights, too: factors are not applied."""
        found = self.stored(name, *shape)
        if name.endswith((".weight", ".bias")) and is_quantised(found):
            raise ConfigError(
                f"{name} in {self.folder} is stored as {found.dtype}: this format is read from "
                "weights that are not quantised."
            )
        return found

    def stored(self, name: str, *shape: int) -> Tensor:
        """On the host, as it is stored. Raises `ConfigError` unless it is there, in this shape."""
        if name not in self:
            raise ConfigError(f"{self.folder} holds no tensor {name}, which its format has.")
        self._taken.add(name)
        try:
            found: Tensor = (
                self._loaded[name] if name in self._loaded else self._file_of[name].get_tensor(name)
            )
        except SafetensorError as error:
            raise ConfigError(f"{name} in {self.folder} cannot be read: {error}") from error
        if shape and tuple(found.shape) != shape:
            raise ConfigError(
                f"{name} in {self.folder} is of shape {list(found.shape)}; {list(shape)} follows "
                "from config.json and the target."
            )
        return found

    def check_all_taken(self, ignored: Iterable[str] = ()) -> None:
        """Raise `ConfigError` if tensors were left: the module would compute something else."""
        left = sorted(
            name
            for name in self.names - self._taken - set(ignored)
            if not name.endswith(".rotary_emb.inv_freq")  # older files have it; config.json rules
        )
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ConfigError(
                f"{self.folder} holds {', '.join(left[:3])}{more}, which its format does not have: "
                "drafts would not be what the module was trained for."
            )

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number above 0 of config.json. Raises `ConfigError`."""
        value = self.config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json in {self.folder}: {key} must be a number above 0.")
        return value

    def group(self, key: str) -> dict[str, Any]:
        """A group of settings of config.json; empty if there is none. Raises `ConfigError`."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"config.json in {self.folder}: {key} must be a group of settings.")
        return value or {}

    def _files(self, name: str = "*") -> list[Path]:
        """Those of weights."""
        if safe := sorted(self.folder.glob(f"{name}.safetensors")):
            return safe
        others = [*self.folder.glob(f"{name}.bin"), *self.folder.glob(f"{name}.pt")]
        return sorted(path for path in others if not any(map(path.match, TRAINING_STATE)))

    def _find(self, paths: list[Path]) -> None:
        for path in paths:
            if path.suffix == ".safetensors":
                file: Any = safe_open(path, framework="pt")
                self._file_of.update(dict.fromkeys(file.keys(), file))
                continue
            try:
                content = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # a broken pickle raises anything
                raise ValueError(f"{path.name}: {error or type(error).__name__}") from error
            if isinstance(content, dict):
                tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)}
                self._loaded.update(tensors)


class TargetTensors:
    """What a draft module shares with its target: embedding and head, read from its folder."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = Checkpoint(folder)
        config = self._checkpoint.config
        self.folder = folder
        self.config: dict[str, Any] = {**config, **self._checkpoint.group("text_config")}
        self.hidden_size = self._number("hidden_size")
        self.vocab_size = self._number("vocab_size")
        self.num_layers = self._number("num_hidden_layers")

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size], as it is stored."""
        return self._matrix(EMBEDDINGS)

    def head(self) -> Tensor:
        """[vocab_size, hidden_size], as it is stored; the embedding if they are tied."""
        if not any(name in self._checkpoint for name in HEADS):
            if not self.config.get("tie_word_embeddings", True):
                raise ConfigError(f"{self.folder} holds no tensor {HEADS[0]}.")
            return self.embedding()
        return self._matrix(HEADS)

    def _matrix(self, names: tuple[str, ...]) -> Tensor:
        name = next((each for each in names if each in self._checkpoint), names[0])
        found = self._checkpoint.stored(name, self.vocab_size, self.hidden_size)
        if is_quantised(found):
            raise ConfigError(
                f"{name} in {self.folder} is stored as {found.dtype}: draft modules can share it "
                "only unquantised."
            )
        return found

    def _number(self, key: str) -> int:
        value = self.config.get(key)
        if value is None:  # it has another name, or is this kind of model's default
            value = getattr(read_text_config(self.folder), key, None)
        if not isinstance(value, int):
            raise ConfigError(f"config.json in {self.folder} has no {key}.")
        return value


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a model folder: it holds no config.json.")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no settings.")
    return config
