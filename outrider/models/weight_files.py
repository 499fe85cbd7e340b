"""Read what a model's folder says about its weights: JSON and headers, never the weights.

It needs no torch, so a service refuses a broken folder before it loads any library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigError
from outrider.models.files import parse_json, read_json

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SHARD: Final = re.compile(r"[^/\\*?\[\]\0]+\.safetensors")  # it is a pattern of downloads, too
_NAMED = 4  # tensors that an error lists
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_OTHER_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".gguf", ".safetensors", ".h5", ".msgpack"})
_ELSEWHERE = (
    "This engine reads float32, float16 and bfloat16 weights; serve the checkpoint with vLLM "
    "(--engine vllm; pip install 'outrider[vllm]'), or use one that is not quantised."
)

# Buffers that older versions of transformers saved and every version computes.
COMPUTED: Final = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|attn\.bias)")
# Modules for multi-token prediction: they draft and are no part of the target.
PREDICTION: Final = re.compile(r"(model\.)?mtp(_layers)?\..*")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes in the file


def check_is_folder(folder: Path) -> None:
    """Raise `ConfigError` unless `folder` is one that holds a config.json."""
    try:
        if (folder / "config.json").is_file():
            return
        adapter = (folder / "adapter_config.json").is_file()
        exists, is_folder = folder.exists(), folder.is_dir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}.") from error
    if adapter:
        raise ConfigError(
            f"{folder} is an adapter (adapter_config.json), not a model: merge it into its base "
            "model with PEFT's merge_and_unload, and save that."
        )
    if is_folder:
        raise ConfigError(f"{folder} is not a model folder: it holds no config.json.")
    if exists:
        raise ConfigError(
            f"{folder} is a file: give a folder that holds config.json and {WEIGHTS}."
        )
    raise ConfigError(f"There is no model folder {folder}.")


def check_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the files of a language model's folder.

    Raises `ConfigError` for what can be refused without reading weights: a missing or broken file,
    a quantised checkpoint, tensors of a type that is no plain number.
    """
    check_is_folder(folder)
    _refuse_quantised(folder)
    tensors = read_headers(folder, _model_files(folder))
    odd = {
        name: tensor.dtype
        for name, tensor in tensors.items()
        if tensor.dtype not in _FLOATS
        and not (COMPUTED.fullmatch(name) or PREDICTION.fullmatch(name))
    }
    if odd:
        dtype = next(iter(odd.values()))
        raise ConfigError(
            f"{folder} holds tensors of type {dtype}, but its config.json names no quantisation: "
            f"{listed(odd)}. {_ELSEWHERE}"
        )
    return tensors


def read_headers(folder: Path, files: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files by name. Raises `ConfigError`.

    The folder's index, if it has one, must name the same tensors in these files.
    """
    tensors: dict[str, StoredTensor] = {}
    files = list(files)
    for file in files:
        found = _read_header(folder / file)
        if twice := tensors.keys() & found.keys():
            raise ConfigError(f"{folder} holds tensors in two files: {listed(twice)}.")
        tensors |= found
    index = {name: file for name, file in read_index(folder).items() if file in files}
    if index:
        held = {name: tensor.file for name, tensor in tensors.items()}
        if wrong := dict(held.items() ^ index.items()):
            raise ConfigError(
                f"{folder / INDEX} does not say what the files hold, for {listed(wrong)}: "
                "download both again."
            )
    return tensors


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the folder's index. Raises `ConfigError`.

    The result is empty without an index, and where one file holds the whole model. Files that the
    index names may be missing.
    """
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return {}
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ConfigError(f"{folder / INDEX} has no weight_map: download it again.")
    if not all(isinstance(file, str) and _SHARD.fullmatch(file) for file in index.values()):
        raise ConfigError(
            f"{folder / INDEX} has a weight_map that names no safetensors files beside it."
        )
    return index


def shards(folder: Path) -> list[str]:
    """Return the files that the folder's index names. Raises `ConfigError` if one is missing."""
    names = sorted(set(read_index(folder).values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ConfigError(
            f"{folder} lacks files that {INDEX} names: {listed(missing)}. Download them."
        )
    return names


def _refuse_quantised(folder: Path) -> None:
    fields = read_json(folder / "config.json")
    settings = fields.get("quantization_config")
    for nested in ("text_config", "llm_config"):
        if settings is None and isinstance(fields.get(nested), dict):
            settings = fields[nested].get("quantization_config")
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        if settings is None and (folder / name).is_file():
            settings = read_json(folder / name)
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        raise ConfigError(f"{folder} is quantised ({method or 'by its config'}). {_ELSEWHERE}")


def _model_files(folder: Path) -> list[str]:
    """Return the files that transformers reads. Raises `ConfigError` if one is missing."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if names := shards(folder):
        if "metadata" not in read_json(folder / INDEX):  # transformers asks for it
            raise ConfigError(f'{folder / INDEX} has no "metadata": add "metadata": {{}} to it.')
        return names
    others = sorted(p.name for p in folder.iterdir() if p.suffix in _OTHER_SUFFIXES)
    found = f" It holds {listed(others)}, which is not read." if others else ""
    raise ConfigError(
        f"{folder} holds no weights: no {WEIGHTS} and no {INDEX}.{found} Save the model as "
        "safetensors."
    )


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Read a safetensors header: eight bytes of length, then JSON, then the tensors' bytes."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file.")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if 8 + length <= min(size, _MAX_HEADER_BYTES) else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    if size < 8 or raw is None:
        raise ConfigError(f"{path} is no safetensors file, or is cut off: download it again.")
    try:
        fields = parse_json(raw)
        fields.pop("__metadata__", None)
        places = {name: _place(entry) for name, entry in fields.items()}
        end = _check_order(places.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has a broken header: download it again.") from error
    if 8 + length + end != size:
        raise ConfigError(
            f"{path} has {size} bytes, its header asks for {8 + length + end}: download it again."
        )
    return {
        name: StoredTensor(
            path.name, entry["dtype"], tuple(entry["shape"]), 8 + length + places[name][0]
        )
        for name, entry in fields.items()
    }


def _place(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end. Raises `ValueError`.

    A tensor of floats has as many bytes as its numbers need.
    """
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, start)):
        raise ValueError(f"{dtype} {shape} at {start}")
    if dtype in _FLOATS:
        size = int(dtype.lstrip("BF")) // 8 * math.prod(shape)
        if end - start != size:
            raise ValueError(f"{end - start} bytes, not {size}")
    return start, end


def _check_order(places: Iterable[tuple[int, int]]) -> int:
    """Return the end of bytes that lie one behind the other. Raises `ValueError`."""
    last = 0
    for start, end in sorted(places):
        if start != last or type(end) is not int or end < start:
            raise ValueError(f"bytes {start} to {end} follow {last}")
        last = end
    return last


def listed(names: Iterable[str]) -> str:
    """Return the first names in order, and how many more there are."""
    every = sorted(names)
    more = len(every) - _NAMED
    return ", ".join(every[:_NAMED]) + (f" and {more} more" if more > 0 else "")
