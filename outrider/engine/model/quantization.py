"""Round a checkpoint's weights to 8 bits while they are read, tensor by tensor."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from outrider.config import QUANTIZATIONS
from outrider.engine.layers.quantized import QuantizedModule, QuantizedWeight
from outrider.engine.model.checkpoint import is_finite, not_finite, read_model
from outrider.engine.model.device_reader import DeviceReader
from outrider.errors import ConfigError, UnsupportedModelError
from outrider.models.quantization import FAMILIES, StoredFormat
from outrider.models.weight_files import StoredTensor, check_folder

DTYPES: Final = dict(zip(QUANTIZATIONS, (torch.int8, torch.float8_e4m3fn), strict=True))
_LINEAR: Final = re.compile(
    r"(?:.*\.)?layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.weight"
)
_HEAD: Final = re.compile(r"(?:.*\.)?lm_head\.weight")
_AT_ONCE: Final = 2**30  # bytes of 16-bit weights that are on the device at a time


def check_quantizable(config: Any, what: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless the native engine runs 8-bit weights of such a model.

    `what` is the flag, or what the checkpoint says. Raises `UnsupportedModelError`, and
    `ConfigError` for a dtype.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{what}: {text.model_type} models have no 8-bit weights in the native engine, which "
            f"has them for {', '.join(sorted(FAMILIES))}."
        )
    if getattr(text, "mlp_bias", False):
        raise UnsupportedModelError(f"{what}: this engine adds no bias to 8-bit gates (mlp_bias).")
    if dtype.itemsize < 4 and not (device.type == "cuda" and dtype is torch.bfloat16):
        allowed = "bfloat16, or float32" if device.type == "cuda" else "float32"
        raise ConfigError(
            f"{what} on {device.type} computes in {allowed}: give --dtype {allowed[:8].rstrip(',')}"
            f", not {str(dtype).removeprefix('torch.')}."
        )


def read_rounded(
    folder: Path, config: Any, quantization: str, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Read a model whose linear layers are rounded as they come.

    Beside what has been rounded, the device holds `_AT_ONCE` bytes of weights at most. Embedding,
    norms and biases keep `dtype`. Raises what `read_model` raises.
    """
    stored = check_folder(folder)
    rounded: dict[str, QuantizedWeight] = {}
    others: dict[str, Tensor] = {}
    for names in _parts(stored):
        for name, tensor in DeviceReader(folder, device, names).tensors().items():
            small = _small_dtype(name, config, quantization)
            if small is None:
                others[name] = tensor
                continue
            if not is_finite(tensor):
                raise not_finite(folder, name)
            rounded[name] = _rounded(tensor, small)
    return assemble(folder, config, dtype, others, rounded)


def read_stored(
    folder: Path, config: Any, stored: StoredFormat, dtype: torch.dtype, reader: DeviceReader
) -> nn.Module:
    """Read a model whose files hold 8-bit weights in a format that `check_folder` accepted.

    Raises `ConfigError` as `read_model` does, and for numbers that are not finite.
    """
    tensors = reader.tensors()
    small = {name: t for name, t in tensors.items() if t.dtype in DTYPES.values()}
    scales = {name: tensors.pop(name + stored.scale_suffix) for name in small}
    for name in small:
        del tensors[name]
    quantized = {
        name: quantized_weight(numbers, scales[name], stored) for name, numbers in small.items()
    }
    if bad := [name for name, weight in quantized.items() if not weight.is_finite()]:
        raise not_finite(folder, *bad)
    plain = copy.copy(config)  # transformers would quantise by itself
    for holder in (plain, plain.get_text_config(decoder=True)):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    return assemble(folder, plain, dtype, tensors, quantized)


def quantized_weight(numbers: Tensor, scales: Tensor, stored: StoredFormat) -> QuantizedWeight:
    """Return a stored weight [out, in] with its scales, which are of a shape that fits."""
    rows, columns = numbers.shape
    scales = scales.float()
    if stored.strategy == "tensor":
        scales = scales.reshape(1, 1).expand(rows, 1).contiguous()
    block = stored.block if stored.strategy == "block" else (1, columns)
    return QuantizedWeight(
        numbers, scales.view(-1, 1) if scales.dim() < 2 else scales, block, stored.rounds_inputs
    )


def round_linears(model: nn.Module, quantization: str) -> None:
    """Round the weights of a loaded model's linear layers, as `read_rounded` does, in place."""
    for path, module in list(model.named_modules()):
        small = _small_dtype(f"{path}.weight", model.config, quantization)
        if isinstance(module, nn.Linear) and small is not None:
            weight = _rounded(module.weight.detach(), small)
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, QuantizedModule(weight, module.bias))


def _small_dtype(name: str, config: Any, quantization: str) -> torch.dtype | None:
    """Return the dtype to which the weight of this name is rounded, None if it is not.

    An output layer of its own becomes int8 in any case: it multiplies few rows, which int8 is for,
    and its error is the logits'.
    """
    if _HEAD.fullmatch(name):
        return None if config.tie_word_embeddings else torch.int8
    return DTYPES[quantization] if _LINEAR.fullmatch(name) else None


def _rounded(weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    return QuantizedWeight.of(weight, dtype, rounds_inputs=dtype is torch.float8_e4m3fn)


def _parts(stored: Mapping[str, StoredTensor]) -> Iterator[frozenset[str]]:
    """Yield names of tensors in the files' order, as many as may be on a device at a time."""
    names: list[str] = []
    size = 0
    for name, tensor in sorted(stored.items(), key=lambda each: (each[1].file, each[1].start)):
        more = math.prod(tensor.shape) * 2
        if names and size + more > _AT_ONCE:
            yield frozenset(names)
            names, size = [], 0
        names.append(name)
        size += more
    if names:
        yield frozenset(names)


def assemble(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    others: dict[str, Tensor],
    quantized: Mapping[str, QuantizedWeight],
) -> nn.Module:
    """Return the model of a folder with 8-bit weights in place of linear layers.

    `others` are all further tensors by name. Raises `ConfigError` as `read_model` does.
    """
    device = next(iter(others.values())).device
    # One number in every place, so that names and shapes are checked without the memory.
    stand_ins = {
        name: torch.zeros(1, dtype=dtype, device=device).expand(weight.shape)
        for name, weight in quantized.items()
    }
    model = read_model(folder, config, dtype, {**others, **stand_ins})
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    modules = dict(model.named_modules())
    for name, weight in quantized.items():
        path = name.removesuffix(".weight")
        path = path if path in modules else prefix + path  # of a saved base model
        module = modules.get(path)
        if not isinstance(module, nn.Linear) or module.weight.untyped_storage().nbytes() > 8:
            raise ConfigError(f"{folder}: no linear layer of its model has the weight {name}.")
        parent, _, child = path.rpartition(".")
        setattr(modules[parent], child, QuantizedModule(weight, module.bias))
    return model


def describe(model: nn.Module) -> str:
    """Return what part of a model's weights has 8 bits, and their size, for a log."""
    small = [each.weight for each in model.modules() if isinstance(each, QuantizedModule)]
    held = [weight for weight in small if weight is not None]
    size = sum(weight.nbytes for weight in held)
    rest = sum(each.nbytes for each in {id(p): p for p in model.parameters()}.values())
    names = {torch.int8: "int8", torch.float8_e4m3fn: "float8 (e4m3)"}
    kind = " and ".join(names[each] for each in dict.fromkeys(w.numbers.dtype for w in held))
    rows, columns = held[0].block
    per = "row" if held[0].by_row else f"{rows} x {columns} block"
    return (
        f"{len(held)} linear layers hold {size / 2**30:.2f} GiB of {kind} with a scale per {per}; "
        f"all else {rest / 2**30:.2f} GiB"
    )
