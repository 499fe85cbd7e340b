"""Read what a model's folder says about its weights: JSON and headers, never the weights.

It needs no torch, so a service refuses a broken folder before it loads any library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from outrider.errors import ConfigError
from outrider.models.files import parse_json, read_json
from outrider.models.quantization import FAMILIES, StoredFormat, read_format

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_SHARD: Final = re.compile(r"[^/\\*?\[\]\0]+\.safetensors")  # it is a pattern of downloads, too
_NAMED = 4  # tensors that an error lists
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_OTHER_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".gguf", ".safetensors", ".h5", ".msgpack"})
_ELSEWHERE = (
    "This engine reads float32, float16 and bfloat16 weights, and 8 bits of some formats; serve "
    "the checkpoint with vLLM (--engine vllm; pip install 'outrider[vllm]'), or use one that is "
    "not quantised."
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
    stored = quantised_as(folder)
    tensors = read_headers(folder, _model_files(folder))
    known = _FLOATS if stored is None else _FLOATS | {stored.dtype}
    odd = {
        name: tensor.dtype
        for name, tensor in tensors.items()
        if tensor.dtype not in known
        and not (COMPUTED.fullmatch(name) or PREDICTION.fullmatch(name))
    }
    if odd:
        dtype = next(iter(odd.values()))
        raise ConfigError(
            f"{folder} holds tensors of type {dtype}, but its config.json names "
            f"{'no quantisation' if stored is None else f'weights of type {stored.dtype}'}: "
            f"{listed(odd)}. {_ELSEWHERE}"
        )
    if stored is not None:
        _check_scales(folder, stored, tensors)
    return tensors


def quantised_as(folder: Path) -> StoredFormat | None:
    """Return how the weights in a language model's folder are quantised; None: they are not.

    Raises `ConfigError` for formats and families that this engine does not read.
    """
    fields = read_json(folder / "config.json")
    named = None
    try:
        stored = read_format(fields)
    except ConfigError as error:
        named = error.message
    else:
        for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
            if stored is None and (folder / name).is_file():
                other = read_json(folder / name)
                named = str(other.get("quant_method") or "by its config")
        family = fields.get("model_type")
        if stored is not None and family not in FAMILIES:
            raise ConfigError(
                f"{folder} is quantised ({stored.name}), which this engine reads for "
                f"{', '.join(sorted(FAMILIES))}, not for {family}. {_ELSEWHERE}"
            )
    if named is not None:
        raise ConfigError(f"{folder} is quantised ({named}). {_ELSEWHERE}")
    return stored


def _check_scales(folder: Path, stored: StoredFormat, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `ConfigError` unless there are 8-bit weights, and scales that fit each of them."""
    small = {name: tensor for name, tensor in tensors.items() if tensor.dtype == stored.dtype}
    if not small:
        raise ConfigError(
            f"{folder} is quantised ({stored.name}) by its config.json, but no tensor in it is of "
            f"type {stored.dtype}. {_ELSEWHERE}"
        )
    for name, tensor in small.items():
        scale = name + stored.scale_suffix
        if len(tensor.shape) != 2:
            raise ConfigError(
                f"{name} in {folder} has 8 bits, and is no matrix: {list(tensor.shape)}."
            )
        if scale not in tensors:
            raise ConfigError(f"{folder} holds no tensor {scale}, the scales of {name}.")
        fitting = stored.scale_shapes(*tensor.shape)
        if tensors[scale].shape not in fitting:
            raise ConfigError(
                f"{scale} in {folder} is of shape {list(tensors[scale].shape)}; "
                f"{list(fitting[0])} follows from {name}, {list(tensor.shape)}, and config.json."
            )


def check_float8(folder: Path) -> None:
    """Raise `ConfigError` if config.json names float8 weights, and no file holds any.

    vLLM would read other weights as such, without scales, and serve what comes of it.
    """
    named = read_json(folder / "config.json").get("quantization_config")
    if not isinstance(named, dict) or str(named.get("quant_method")).lower() != "fp8":
        return
    headers = [_read_header(path) for path in sorted(folder.glob("*.safetensors"))]
    if headers and not any(t.dtype.startswith("F8") for each in headers for t in each.values()):
        raise ConfigError(
            f"{folder} is quantised (fp8) by its config.json, but no tensor in it is of 8 bits. "
            "Leave quantization_config out of config.json, or download the weights that it names."
        )


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
        with safe_open(path, "np"):  # checks the header, and the file's size
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            fields = parse_json(file.read(length))
    except SafetensorError as error:
        raise ConfigError(
            f"{path} is no safetensors file, is cut off or has a broken header ({error}): download "
            "it again."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    fields.pop("__metadata__", None)
    begin = 8 + length
    return {
        name: StoredTensor(
            path.name, each["dtype"], tuple(each["shape"]), begin + each["data_offsets"][0]
        )
        for name, each in fields.items()
    }


def listed(names: Iterable[str]) -> str:
    """Return the first names in order, and how many more there are."""
    every = sorted(names)
    more = len(every) - _NAMED
    return ", ".join(every[:_NAMED]) + (f" and {more} more" if more > 0 else "")
