"""Reads checkpoint folders of draft modules, and the tensors that they share with the target."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.engine.model.loader import read_text_config
from outrider.errors import ConfigError
from outrider.models.files import read_json
from outrider.models.modules import EMBEDDINGS, HEADS
from outrider.models.resolve import TRAINING_STATE

_SCALES = "_scale_inv"


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def folder(self) -> Path: ...

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor on the host. Raises `ConfigError` unless it is there, in this shape."""
        ...


class Checkpoint:
    """A folder's config.json, and its tensors by name, each loaded when it is asked for.

    The folder holds safetensors, or files that `torch.load` reads without running code (`*.bin`,
    `*.pt`). Where files are named `preferred`, up to the ending, no others are read. Raises
    `ConfigError` for a folder that is no checkpoint, and for broken files.
    """

    def __init__(self, folder: Path, preferred: str = "*") -> None:
        self.folder = folder
        self.config = _read_config(folder)
        self._file_of: dict[str, Any] = {}  # of safetensors
        self._loaded: dict[str, Tensor] = {}  # of the other kinds
        self.taken: set[str] = set()
        try:
            self._find(self._files(preferred) or self._files())
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(f"The weights in {folder} cannot be read: {error}") from error
        self.names = frozenset(self._file_of) | frozenset(self._loaded)
        if not self.names:
            raise ConfigError(f"{folder} holds no weights (*.safetensors, *.bin or *.pt).")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return floating-point numbers; float8 is multiplied by its factors, to float32.

        Raises `ConfigError` unless they are there in this shape, and for other quantisations.
        """
        stored = self.stored(name, *shape)
        if stored.is_floating_point() and stored.dtype.itemsize > 1:
            return stored
        block = self._block_size()
        if stored.dtype is not torch.float8_e4m3fn or stored.dim() != 2 or block is None:
            raise ConfigError(
                f"{name} in {self.folder} is stored as {stored.dtype}, {stored.dim()}-dimensional: "
                "a head is read from floating-point weights or from float8 (e4m3) matrices with "
                "factors per block, which config.json announces as quantization_config."
            )
        rows, columns = -(-stored.shape[0] // block[0]), -(-stored.shape[1] // block[1])
        return dequantise(stored, self.stored(name + _SCALES, rows, columns), block)

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

    def check_all_taken(self, ignored: Iterable[str] = ()) -> None:
        """Raise `ConfigError` if tensors were not read: the module would differ without them."""
        left = sorted(
            name
            for name in self.names - self.taken - set(ignored)
            if not name.endswith(".rotary_emb.inv_freq")  # older files have it; config.json rules
        )
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ConfigError(
                f"{self.folder} holds {', '.join(left[:3])}{more}, which its format does not have: "
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

    def _block_size(self) -> tuple[int, int] | None:
        """Return rows and columns of a block with one factor; None if nothing is quantised."""
        config = self.group("quantization_config")
        if not config:
            return None
        sizes = config.get("weight_block_size")
        match sizes:
            case [int(rows), int(columns)] if rows > 0 < columns:
                if config.get("quant_method") == "fp8":
                    return rows, columns
        raise ConfigError(
            f"config.json in {self.folder}: of quantised heads those are known with "
            'quantization_config {"quant_method": "fp8", "weight_block_size": [128, 128]}.'
        )

    def _files(self, name: str = "*") -> list[Path]:
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


def dequantise(weight: Tensor, factors: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply float8 weights [m, n] by a factor per block, as DeepSeek-V3's README_WEIGHTS says.

    `factors` [m / block[0], n / block[1]], rounded up; the result is float32.
    """
    rows, columns = weight.shape
    per_row = factors.float().repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * per_row.repeat_interleave(block[0], 0)[:rows]


class TargetTensors:
    """The tensors that a draft module shares with its target: embedding and head."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = Checkpoint(folder)
        config = self._checkpoint.config
        self.folder = folder
        self.config: dict[str, Any] = {**config, **self._checkpoint.group("text_config")}
        self.hidden_size = self._number("hidden_size")
        self.vocab_size = self._number("vocab_size")
        self.num_layers = self._number("num_hidden_layers")

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


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a model folder: it holds no config.json.")
    return read_json(path)
