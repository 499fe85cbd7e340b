"""Reads checkpoint folders of draft modules, and the tensors that they share with the target."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.engine.model.checkpoint import is_finite, not_finite
from outrider.engine.model.loader import read_text_config
from outrider.engine.model.quantization import quantized_weight
from outrider.errors import ConfigError
from outrider.models.download import TRAINING_STATE
from outrider.models.files import read_json
from outrider.models.modules import EMBEDDINGS, HEADS, shared_files
from outrider.models.quantization import StoredFormat, read_format
from outrider.models.weight_files import (
    COMPUTED,
    check_is_folder,
    listed,
    read_headers,
    read_index,
    shards,
)

_SAFE = ".safetensors"


class TensorSource(Protocol):
    """Tensors by name."""

    folder: Path

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor on the host. Raises `ConfigError` unless it is there, in this shape."""


class Checkpoint:
    """A folder's config.json, and its tensors by name, each loaded when it is asked for.

    The folder holds safetensors, or files that `torch.load` reads without running code (`*.bin`,
    `*.pt`). Where files are named `preferred`, up to the ending, no others are read. An index says
    which files belong together. Raises `ConfigError` for a folder that is no checkpoint, and for
    missing or broken files.
    """

    def __init__(self, folder: Path, preferred: str = "", *, shared_only: bool = False) -> None:
        """With `shared_only`, read the files with tensors that modules share with a target."""
        check_is_folder(folder)
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self._loaded: dict[str, Tensor] = {}  # of pickled files
        self.taken: set[str] = set()
        files = self._files(preferred, shared_only=shared_only)
        headers = read_headers(folder, [file for file in files if file.endswith(_SAFE)])
        try:
            handles = {t.file: safe_open(folder / t.file, "pt") for t in headers.values()}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"The weights in {folder} cannot be read: {error}") from error
        self._file_of: dict[str, Any] = {
            name: handles[tensor.file] for name, tensor in headers.items()
        }
        for file in files:
            if not file.endswith(_SAFE):
                self._loaded.update(_unpickled(folder / file))
        self.names = frozenset(self._file_of) | frozenset(self._loaded)
        if not self.names:
            raise ConfigError(f"{folder} holds no weights (*.safetensors, *.bin or *.pt).")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return finite numbers; those of 8 bits are multiplied by their scales, to float32.

        Raises `ConfigError` unless they are there in this shape, and for other quantisations.
        """
        found = self._floats(self.stored(name, *shape), name)
        if not is_finite(found):
            raise not_finite(self.folder, name)
        return found

    def _floats(self, stored: Tensor, name: str) -> Tensor:
        if stored.is_floating_point() and stored.dtype.itemsize > 1:
            return stored
        form = self._format()
        kind = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
        if form is None or stored.dtype is not kind[form.dtype] or stored.dim() != 2:
            raise ConfigError(
                f"{name} in {self.folder} is stored as {stored.dtype}, {stored.dim()}-dimensional: "
                "a head is read from floating-point weights, or from matrices of 8 bits with "
                "scales, which config.json announces as quantization_config."
            )
        scales = self.stored(name + form.scale_suffix)
        if tuple(scales.shape) not in (fitting := form.scale_shapes(*stored.shape)):
            raise ConfigError(
                f"{name}{form.scale_suffix} in {self.folder} is of shape {list(scales.shape)}; "
                f"{list(fitting[0])} follows from {name} and config.json."
            )
        return quantized_weight(stored, scales, form).dequantise()

    def stored(self, name: str, *shape: int) -> Tensor:
        """Return a tensor as it is stored. Raises `ConfigError` unless it is there, so shaped."""
        if name not in self:
            raise ConfigError(f"{self.folder} holds no tensor {name}, which its format has.")
        self.taken.add(name)
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

    def token_ids(self, name: str, vocab_size: int, count: int | None = None) -> Tensor:
        """Return different token ids below `vocab_size`, int64. Raises `ConfigError`."""
        stored = self.stored(name)
        ids = stored.flatten().tolist()
        if (
            stored.dtype not in (torch.int64, torch.int32)
            or stored.dim() != 1
            or count not in (None, len(ids))
            or len(set(ids)) < len(ids)
            or not 0 <= min(ids, default=-1) <= max(ids, default=vocab_size) < vocab_size
        ):
            number = "" if count is None else f"{count} "
            raise ConfigError(
                f"{name} in {self.folder} must hold {number}different token ids below {vocab_size}."
            )
        return stored.long()

    def check_all_taken(self, ignored: Iterable[str] = (), prefix: str = "") -> None:
        """Raise `ConfigError` if tensors were not read: the module would differ without them.

        Those without the `prefix` belong to the target, beside which the module is stored.
        """
        left = {name for name in self.names - self.taken - set(ignored) if name.startswith(prefix)}
        left = {name for name in left if not COMPUTED.fullmatch(name)}
        if left:
            raise ConfigError(
                f"{self.folder} holds {listed(left)}, which its format does not have: "
                "drafts would not be what the module was trained for."
            )

    def number(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0 of config.json. Raises `ConfigError`."""
        value = self.config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json in {self.folder}: {key} must be a number above 0.")
        return value

    def group(self, key: str) -> dict[str, Any]:
        """Return a group of settings, empty if config.json has none. Raises `ConfigError`."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"config.json in {self.folder}: {key} must be a group of settings.")
        return value or {}

    def _format(self) -> StoredFormat | None:
        """Return how weights of 8 bits are stored; None if config.json announces nothing."""
        try:
            return read_format(self.config)
        except ConfigError as error:
            raise ConfigError(
                f"config.json in {self.folder}: its quantization_config ({error.message}) is not "
                "known for heads; fp8 and compressed-tensors of 8 bits are."
            ) from error

    def _files(self, preferred: str, *, shared_only: bool) -> list[str]:
        """Return the names of the files to read: safetensors, or else pickled ones."""
        for name in (preferred, "*") if preferred else ("*",):
            if name == "*" and read_index(self.folder):
                return list(shared_files(self.folder)) if shared_only else shards(self.folder)
            if safe := sorted(path.name for path in self.folder.glob(f"{name}{_SAFE}")):
                return safe
            others = [*self.folder.glob(f"{name}.bin"), *self.folder.glob(f"{name}.pt")]
            others = [path for path in others if not any(map(path.match, TRAINING_STATE))]
            if others:
                return sorted(path.name for path in others)
        return []


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file that torch.save wrote, without running code in it."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises anything
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"The weights in {path.parent} cannot be read: {path.name}: {reason}. Download it "
            "again, or save it as safetensors."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"{path} holds more than tensors by name: save it as safetensors.")
    return content


class TargetTensors:
    """The tensors that a draft module shares with its target: embedding and head."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = Checkpoint(folder, shared_only=True)
        config = self._checkpoint.config
        self.folder = folder
        self.config: dict[str, Any] = {**config, **self._checkpoint.group("text_config")}
        self.hidden_size = self._number("hidden_size")
        self.vocab_size = self._number("vocab_size")
        self.num_layers = self._number("num_hidden_layers")
        longest = self.config.get("max_position_embeddings")
        self.max_positions = longest if isinstance(longest, int) else 0  # 0: it does not say

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]."""
        return self._matrix(EMBEDDINGS)

    def head(self) -> Tensor:
        """[vocab_size, hidden_size]; the embedding if they are tied."""
        if not any(name in self._checkpoint for name in HEADS):
            if not self.config.get("tie_word_embeddings", True):
                raise ConfigError(f"{self.folder} holds no tensor {HEADS[0]}.")
            return self.embedding()
        return self._matrix(HEADS)

    def check_trained_for(self, folder: Path, hidden_size: int) -> None:
        """Raise `ConfigError` if the module in `folder` reads states of another size."""
        if hidden_size != self.hidden_size:
            raise ConfigError(
                f"The module in {folder} was made for states of {hidden_size} numbers; those of "
                f"the target in {self.folder} have {self.hidden_size}."
            )

    def _matrix(self, names: tuple[str, ...]) -> Tensor:
        name = next((each for each in names if each in self._checkpoint), names[0])
        return self._checkpoint.tensor(name, self.vocab_size, self.hidden_size)

    def _number(self, key: str) -> int:
        value = self.config.get(key)
        if value is None:  # it has another name, or is this kind of model's default
            value = getattr(read_text_config(self.folder), key, None)
        if not isinstance(value, int):
            raise ConfigError(f"config.json in {self.folder} has no {key}.")
        return value
