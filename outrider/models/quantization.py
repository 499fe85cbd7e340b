"""Read from config.json how a checkpoint's weights are quantised. Knows nothing of torch.

Formats are those of DeepSeek-V3's README_WEIGHTS (`fp8`) and of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from outrider.errors import ConfigError

FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""The `model_type` of targets whose linear layers may have 8 bits in the native engine."""
_FORMATS: Final = ("float-quantized", "int-quantized", "naive-quantized")
"""Formats of compressed-tensors that store one number per byte."""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """8-bit weights with float scales, as a checkpoint's files hold them."""

    name: str
    dtype: Literal["F8_E4M3", "I8"]
    scale_suffix: str
    """A weight's name with this suffix names its scales."""
    strategy: Literal["tensor", "channel", "block"]
    block: tuple[int, int] = (0, 0)
    """Rows and columns with one scale, if they are blocks."""
    rounds_inputs: bool = True
    """Inputs are rounded to 8 bits, too, each with a scale of its own."""

    def scale_shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a weight [rows, columns] may have."""
        if self.strategy == "tensor":
            return (), (1,), (1, 1)
        if self.strategy == "channel":
            return (rows, 1), (rows,)
        return ((-(-rows // self.block[0]), -(-columns // self.block[1])),)


def read_format(config: Mapping[str, Any]) -> StoredFormat | None:
    """Return the format that config.json announces; None if it announces none.

    Raises `ConfigError` that names what is announced, for formats that are not read.
    """
    settings = config.get("quantization_config")
    for nested in ("text_config", "llm_config"):
        if settings is None and isinstance(config.get(nested), Mapping):
            settings = config[nested].get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError("by its config")
    method = str(settings.get("quant_method") or "by its config")
    try:
        if method == "fp8":
            return _fp8(settings)
        if method == "compressed-tensors":
            return _compressed_tensors(settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{method}, of which config.json lacks {error}") from error
    raise ConfigError(method)


def _fp8(settings: Mapping[str, Any]) -> StoredFormat:
    if (scheme := settings.get("activation_scheme", "dynamic")) != "dynamic":
        raise ConfigError(f"fp8, activation_scheme {scheme}")
    if (fmt := settings.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"fp8, fmt {fmt}")
    match settings.get("weight_block_size"):
        case None:
            return StoredFormat("fp8", "F8_E4M3", "_scale", "tensor")
        case [int(rows), int(columns)] if rows > 0 < columns:
            return StoredFormat("fp8", "F8_E4M3", "_scale_inv", "block", (rows, columns))
        case sizes:
            raise ConfigError(f"fp8, weight_block_size {sizes}")


def _compressed_tensors(settings: Mapping[str, Any]) -> StoredFormat:
    name = "compressed-tensors"
    if (kind := settings.get("format")) not in _FORMATS:
        raise ConfigError(f"{name}, format {kind}" if kind else f"{name} without a format")
    for other in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if settings.get(other):
            raise ConfigError(f"{name}, {other}")
    groups = list(settings["config_groups"].values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise ConfigError(f'{name}, with other config_groups than one for "Linear"')
    weights, inputs = groups[0]["weights"], groups[0].get("input_activations")
    bits, number = weights["num_bits"], weights["type"]
    if bits != 8 or number not in ("float", "int"):
        raise ConfigError(f"{name}, weights of {bits} bits, type {number}")
    if not weights.get("symmetric", True):
        raise ConfigError(f"{name}, weights that are not symmetric")
    if weights.get("actorder"):
        raise ConfigError(f"{name}, actorder {weights['actorder']}")
    if groups[0].get("output_activations"):
        raise ConfigError(f"{name}, output_activations")
    if inputs:
        if inputs.get("dynamic") is not True:
            raise ConfigError(f"{name}, input_activations that are not dynamic")
        if inputs["num_bits"] != 8:
            raise ConfigError(f"{name}, input_activations of {inputs['num_bits']} bits")
    dtype: Literal["F8_E4M3", "I8"] = "F8_E4M3" if number == "float" else "I8"
    strategy, block = weights["strategy"], (0, 0)
    if strategy == "group":
        strategy, block = "block", (1, int(weights["group_size"]))
    elif strategy == "block":
        rows, columns = weights["block_structure"]
        block = (int(rows), int(columns))
    elif strategy not in ("tensor", "channel"):
        raise ConfigError(f"{name}, strategy {strategy}")
    if strategy == "block" and min(block) < 1:
        raise ConfigError(f"{name}, blocks of {list(block)}")
    return StoredFormat(name, dtype, "_scale", strategy, block, bool(inputs))
