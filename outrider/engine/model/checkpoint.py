"""Read a target's checkpoint, or say in one line why not.

A checkpoint is served only if every tensor that the model needs was read, every tensor in the
files was used, and every shape is the one that config.json says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import ConfigError
from outrider.models.files import read_json

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_NAMED = 4  # tensors that an error lists

_HARMLESS = (
    # Buffers that older versions of transformers saved and every version computes.
    re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
    re.compile(r"(.*\.)?masked_bias"),
    re.compile(r"(.*\.)?attn\.bias"),
    # Modules for multi-token prediction: they draft and are no part of the target.
    re.compile(r"(model\.)?mtp(_layers)?\..*"),
)
_HARMLESS_TEXT_ONLY = re.compile(
    # Towers of other modalities: only text is served.
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision"
    r"|embed_audio|merger|mm_projector)\..*"
)
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def check_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a folder's files; reads headers and JSON only.

    Raises `ConfigError` for what can be refused without reading weights: a missing or broken file,
    a quantised checkpoint, tensors of a type that is no plain number.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it holds no config.json.")
    _refuse_quantised(folder)
    tensors: dict[str, StoredTensor] = {}
    for name in _weight_files(folder):
        tensors |= _read_header(folder / name)
    odd = {name: t.dtype for name, t in tensors.items() if t.dtype not in _NUMBERS}
    odd = {name: dtype for name, dtype in odd.items() if not _is_harmless(name, None)}
    if odd:
        dtype = next(iter(odd.values()))
        raise ConfigError(
            f"{folder} holds tensors of type {dtype}, but its config.json names no quantisation: "
            f"{_listed(odd)}. {_ELSEWHERE}"
        )
    return tensors


_ELSEWHERE = (
    "This engine reads float32, float16 and bfloat16 weights; serve the checkpoint with vLLM, or "
    "use one that is not quantised."
)


def read_model(folder: Path, config: Any, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Read the weights of a folder that `check_folder` accepted.

    `options` go to `from_pretrained`. Raises `ConfigError` that names the tensors which are
    missing, unused, of another shape than config.json says, or not finite.
    """
    # Progress bars and reports of transformers would run through the services' own lines.
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused here
            **options,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"The model in {folder} cannot be read: {_first_line(error)}") from error
    problems = [str(error) for error in report.get("error_msgs") or ()]
    if mismatched := report["mismatched_keys"]:
        problems.append(
            "other shapes than config.json says: "
            + _listed(
                f"{name} is {list(stored)}, not {list(wanted)}"
                for name, stored, wanted in mismatched
            )
        )
    if missing := report["missing_keys"]:
        problems.append(f"tensors that the model needs are missing: {_listed(missing)}")
    unused = [name for name in report["unexpected_keys"] if not _is_harmless(name, config)]
    if unused:
        problems.append(f"tensors that the model does not use: {_listed(unused)}")
    if problems:
        raise ConfigError(
            f"{folder} does not hold the model of its config.json: {'; '.join(problems)}. "
            "Download it again, or correct config.json."
        )
    return model  # type: ignore[no-any-return]


def check_finite(model: nn.Module, folder: Path) -> None:
    """Raise `ConfigError` naming weights that hold NaN or infinity."""
    bad = [name for name, weight in model.named_parameters() if not _is_finite(weight)]
    if bad:
        raise ConfigError(
            f"{folder} holds weights that are not finite numbers: {_listed(bad)}. "
            "Download it again."
        )


def _is_finite(weight: torch.Tensor) -> bool:
    # A sum is one pass without a mask as large as the weight; finite weights may overflow it.
    return bool(weight.sum(dtype=torch.float64).isfinite()) or bool(weight.isfinite().all())


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


def _weight_files(folder: Path) -> list[str]:
    """Return the files that transformers reads. Raises `ConfigError` if one is missing."""
    if (folder / _WEIGHTS).is_file():
        return [_WEIGHTS]
    if not (folder / _INDEX).is_file():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in _OTHER_SUFFIXES)
        found = f" It holds {_listed(others)}, which is not read." if others else ""
        raise ConfigError(f"{folder} holds no weights: no {_WEIGHTS} and no {_INDEX}.{found}")
    shards = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ConfigError(f"{folder / _INDEX} has no weight_map: download it again.")
    names = sorted({str(name) for name in shards.values()})
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ConfigError(f"{folder} lacks files that {_INDEX} names: {_listed(missing)}.")
    return names


_OTHER_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".gguf", ".safetensors", ".h5", ".msgpack"})


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Read a safetensors header: eight bytes of length, then JSON, then the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ConfigError(f"{path} is no safetensors file, or is cut off: download it again.")
        raw = file.read(length)
    try:
        fields = json.loads(raw)
        fields.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(path.name, str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in fields.items()
        }
        end = max((int(entry["data_offsets"][1]) for entry in fields.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path} has a broken header: download it again.") from error
    if 8 + length + end != size:
        raise ConfigError(
            f"{path} has {size} bytes, its header asks for {8 + length + end}: download it again."
        )
    return tensors


def _is_harmless(name: str, config: Any) -> bool:
    if any(pattern.fullmatch(name) for pattern in _HARMLESS):
        return True
    if config is None:
        return False
    text = config.get_text_config(decoder=True)
    if text is not config and _HARMLESS_TEXT_ONLY.fullmatch(name):
        return True
    # Layers behind the last one are prediction modules where config.json counts them.
    layer = _LAYER.fullmatch(name)
    modules = int(getattr(text, "num_nextn_predict_layers", 0) or 0)
    first = int(text.num_hidden_layers)
    return layer is not None and first <= int(layer[1]) < first + modules


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = len(every) - _NAMED
    return ", ".join(every[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def read_config(folder: Path) -> Any:
    """Read config.json as transformers does. Raises `ConfigError`."""
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # each config class checks its fields in its own way
        raise ConfigError(
            f"The config.json in {folder} cannot be read: {_first_line(error)}"
        ) from error
