"""Choose the engine that serves a model, in this one place. Imports no engine, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from outrider.errors import ConfigError, UnsupportedModelError
from outrider.models.files import read_json
from outrider.models.quantization import FAMILIES, StoredFormat, read_format

AUTO, NATIVE, VLLM = "auto", "native", "vllm"
ENGINES: Final = (AUTO, NATIVE, VLLM)
INSTALL: Final = "pip install 'outrider[vllm]'"

_DENSE_LLAMAS: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Architectures with a fused step, which is ahead of vLLM on one GPU."""
_QUANTISED: Final = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_PLAIN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model to serve, and the devices for it."""

    config: Mapping[str, Any]
    """The model's config.json, with the fields of a nested text model as its own."""
    on_gpu: bool = False
    num_devices: int = 1
    quantised: bool = False
    """In a format that the native engine does not read."""
    float8: bool = False
    """In one of float8 that it reads."""

    @classmethod
    def of(cls, folder: Path, *, on_gpu: bool, num_devices: int = 1) -> Wanted:
        """Read a model's folder. Raises `ConfigError`."""
        config = read_json(folder / "config.json")
        nested = config.get("text_config")
        if isinstance(nested, dict):
            config = config | nested
        float8 = False
        quantised = any((folder / name).is_file() for name in _QUANTISED)
        if isinstance(config.get("quantization_config"), dict):
            stored = _format(config)
            quantised, float8 = stored is None, stored is not None and stored.dtype != "I8"
        return cls(config, on_gpu, num_devices, quantised, float8)


def _format(config: Mapping[str, Any]) -> StoredFormat | None:
    """Return the format of a quantised checkpoint's weights, if the native engine reads it."""
    try:
        return read_format(config) if config.get("model_type") in FAMILIES else None
    except ConfigError:
        return None


class Rule(NamedTuple):
    """Models that vLLM serves, or serves faster."""

    what: str
    holds: Callable[[Wanted], bool]
    native_serves: bool
    """The native engine serves them exactly, though slower."""


RULES: Final = (
    Rule("A model over several devices", lambda w: w.num_devices > 1, native_serves=False),
    Rule("A checkpoint quantised in this way", lambda w: w.quantised, native_serves=False),
    Rule("A float8 checkpoint on a GPU", lambda w: w.on_gpu and w.float8, native_serves=True),
    Rule(
        "A model with other layers than attention over all keys or a window",
        lambda w: (
            bool({*(w.config.get("layer_types") or ())} - _PLAIN_LAYERS)
            or any(w.config.get(name) for name in ("index_topk", "attention_chunk_size"))
            or bool(w.config.get("num_kv_shared_layers"))
        ),
        native_serves=False,
    ),
    Rule(
        "A model with latent attention (MLA) on a GPU",
        lambda w: w.on_gpu and bool(w.config.get("kv_lora_rank")),
        native_serves=True,
    ),
    Rule(
        "A mixture of experts on a GPU",
        lambda w: w.on_gpu and any((w.config.get(name) or 0) > 1 for name in _EXPERTS),
        native_serves=True,
    ),
    Rule(
        "On a GPU, a model that is not a dense one of the Llama family",
        lambda w: w.on_gpu and _DENSE_LLAMAS.isdisjoint(w.config.get("architectures") or ()),
        native_serves=True,
    ),
)
"""In order; the first that holds decides. What none holds for, the native engine serves exactly,
and faster than vLLM (docs/engines.md has the measurements)."""


def choose(asked: str, wanted: Wanted, *, installed: bool | None = None) -> str:
    """Return `NATIVE` or `VLLM`. Raises `ConfigError` for an engine that cannot serve, or is not.

    `installed` tells whether vLLM is; None: look.
    """
    try:
        rule = next((rule for rule in RULES if rule.holds(wanted)), None)
    except TypeError as error:
        raise ConfigError(f"A field of config.json has a wrong type: {error}.") from error
    if installed is None:
        installed = has_vllm()
    if asked == NATIVE:
        if wanted.num_devices > 1:
            raise ConfigError("--engine native serves from one device: leave --engine out.")
        return NATIVE
    if asked == AUTO and rule is None:
        return NATIVE
    if installed:
        return VLLM
    if asked == AUTO and rule and wanted.num_devices == 1 and not rule.native_serves:
        return NATIVE  # its refusal says why, and names vLLM
    what = "--engine vllm needs vLLM" if rule is None else f"{rule.what} is served by vLLM"
    slower = ", or --engine native, which serves it slower" if rule and rule.native_serves else ""
    raise ConfigError(f"{what}, which is not installed: {INSTALL}{slower}.")


def check_rounding(engine: str, quantization: str | None) -> None:
    """Refuse to round weights on load by our flag where vLLM serves. Raises `ConfigError`."""
    if engine == VLLM and quantization not in (None, "none"):
        raise ConfigError(
            f"--quantization {quantization} is for --engine native: give vLLM's own after --, as "
            "-- --quantization fp8."
        )


def check_synthetic(engine: str, *, asked: bool) -> None:
    """Refuse synthetic acceptance by our flags where vLLM serves. Raises `ConfigError`."""
    if engine == VLLM and asked:
        raise ConfigError(
            "--synthetic-acceptance-* is for --engine native: give vLLM's keys after --, as "
            """-- --speculative-config '{..., "rejection_sample_method": "synthetic", """
            """"synthetic_acceptance_rates": [0.9, 0.6]}'."""
        )


def has_vllm() -> bool:
    """Tell whether vLLM is installed, without importing it."""
    return find_spec("vllm") is not None


def naming_vllm(error: UnsupportedModelError) -> UnsupportedModelError:
    """Return the native engine's refusal with what may serve the model instead."""
    message = f"{error.message} vLLM may serve it: --engine vllm ({INSTALL})."
    return UnsupportedModelError(message, reason=error.reason)
