"""Arguments of `LLM` under vLLM's names, as the options of a scorer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from outrider.cli.dialects import VLLM as VLLM_FLAGS
from outrider.config import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS
from outrider.engines import AUTO, ENGINES, NATIVE, VLLM, Wanted, choose, has_vllm
from outrider.errors import ConfigError, UnsupportedModelError
from outrider.models.facts import stored_dtype
from outrider.models.resolve import resolve_model
from outrider.offline.speculation import (
    naming_config,
    read_speculation,
    switched_off,
    with_names,
)
from outrider.rpc import runtime
from outrider.vllm.flags import num_devices
from scorer_service.__main__ import resolve
from scorer_service.config import ScorerOptions
from scorer_service.drafting.in_process_flags import states_of

NAME: Final = "LLM"
_SERVE: Final = "for several, outrider serve MODEL --tensor-parallel-size N"
_FOLDER: Final = "download it, and give its folder as model"

_NEUTRAL: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "tensor_parallel_size": ((1,), f"an LLM runs on one GPU; {_SERVE}"),
    "pipeline_parallel_size": ((1,), f"an LLM runs on one GPU; {_SERVE}"),
    "data_parallel_size": ((1,), "run one LLM in each of several processes"),
    "enable_expert_parallel": ((False,), "an LLM runs on one GPU"),
    "speculative_draft_tensor_parallel_size": ((1,), "a draft runs on one GPU"),
    "revision": ((), _FOLDER),
    "tokenizer_revision": ((), _FOLDER),
    "download_dir": ((), "set HF_HOME"),
    "load_format": (("auto", "safetensors"), "weights are read from *.safetensors"),
    "cpu_offload_gb": ((0,), "the model must fit on the device"),
    "disable_custom_all_reduce": ((False, True), "there is one GPU"),
    "enable_lora": ((False,), "merge the adapter into the model"),
    "skip_tokenizer_init": ((False,), "the model's folder must hold a tokenizer"),
    "tokenizer_mode": (("auto", "fast"), "a fast tokenizer (tokenizer.json) is needed"),
    "chat_template": ((), "put it into the model's folder, as chat_template.jinja"),
    "task": (("auto", "generate"), "an LLM only generates"),
    "runner": (("auto", "generate"), "an LLM only generates"),
    "hf_overrides": ((), "change config.json in the model's folder"),
}
"""Arguments of vLLM's -> the values that ask for nothing, besides None; what to do instead."""

_SAME: Final = (
    *("model", "gpu_memory_utilization", "max_model_len", "max_num_batched_tokens"),
    *("kv_cache_memory", "attention_backend", "speculation_policy", "enable_prefix_caching"),
)
"""Arguments that are flags of a scorer by the same names."""
_NAMES: Final = {"page_size": "block_size"}
"""Flags of a scorer -> the arguments that they come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of `LLM` that have an effect, besides the tokenizer's."""

    model: str
    dtype: Any = "auto"
    device: str = "auto"
    seed: int | None = 0
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = KV_CACHE_DTYPES[0]
    attention_backend: str | None = None
    quantization: str | None = None
    speculation_policy: str = "adaptive"
    served_model_name: str | None = None
    speculative_config: Mapping[str, Any] | None = None
    engine: str = AUTO


@contextmanager
def naming_arguments(names: Mapping[str, str] = _NAMES) -> Iterator[None]:
    """Name the caller's arguments in errors about a scorer's flags; `names` are others' names."""
    try:
        yield
    except (ConfigError, UnsupportedModelError) as error:
        said = with_names(error.message.removeprefix("argument "), names)
        raise type(error)(said) from error


def check_others(others: Mapping[str, Any]) -> None:
    """Note arguments of vLLM's that have no effect. Raises `ConfigError` for all others."""
    for key, value in others.items():
        if key in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[key][0]:
                raise ConfigError(f"{key}={value!r} is not supported: {_NEUTRAL[key][1]}.")
        elif (why := VLLM_FLAGS.needless(f"--{key.replace('_', '-')}")) is None:
            raise ConfigError(
                f"{NAME} takes no argument {key}; see docs/offline.md for those it takes."
            )
        elif value:
            runtime.progress(NAME, f"{key} has no effect: {why}.")


def take_old_speculation(others: dict[str, Any]) -> dict[str, Any] | None:
    """Take the arguments by which older versions of vLLM configured speculation."""
    names = {
        "speculative_model": "model",
        "num_speculative_tokens": "num_speculative_tokens",
        "ngram_prompt_lookup_max": "prompt_lookup_max",
        "ngram_prompt_lookup_min": "prompt_lookup_min",
        "speculative_max_model_len": "max_model_len",
    }
    found = {new: others.pop(old) for old, new in names.items() if old in others}
    return found or None


def scorer_options(given: Arguments, others: Mapping[str, Any] | None = None) -> ScorerOptions:
    """Return the options of the scorer within this process; `others` are arguments of vLLM's.

    Raises `ConfigError`.
    """
    others = others or {}
    device = given.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device.startswith("cuda")
    engine = _engine(given, others, on_gpu=on_gpu)
    if engine == NATIVE:
        check_others(others)
        if given.quantization not in (None, "none", *QUANTIZATIONS):
            raise ConfigError(
                f"quantization={given.quantization!r} is not int8, fp8 or none, which round a "
                "16-bit checkpoint's weights; the rest is vLLM's (engine='vllm')."
            )
        if given.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype={given.kv_cache_dtype!r} is not auto, the model's, or fp8, which "
                "is e4m3; the rest is vLLM's (engine='vllm')."
            )
    rows = 256 if on_gpu and given.max_num_seqs is None else given.max_num_seqs
    flags = {name: getattr(given, name) for name in _SAME} | {
        "device": device,
        "engine": engine,
        "served_model_name": given.served_model_name or given.model,
        "scorer_id": "offline",
        "dtype": _dtype(given, on_gpu=on_gpu),
        "max_num_seqs": rows,
        "page_size": given.block_size,
        "num_speculative_tokens": 0,
    }
    rounding = {"quantization": given.quantization, "kv_cache_dtype": given.kv_cache_dtype}
    if engine == VLLM:
        asked = None if switched_off(given.speculative_config) else given.speculative_config
        own = {**others, "speculative_config": asked or None, **rounding}
        own["attention_backend"] = flags.pop("attention_backend")
        if given.kv_cache_dtype == KV_CACHE_DTYPES[0]:
            del own["kv_cache_dtype"]
        return _options(flags, own)
    speculation = read_speculation(given.speculative_config, given.model, device)
    rates = speculation.synthetic_rates
    flags["num_speculative_tokens"] = speculation.num_tokens
    flags["synthetic_acceptance_rates"] = [*rates] if isinstance(rates, tuple) else rates
    flags["synthetic_acceptance_length"] = speculation.synthetic_length
    methods, options = speculation.methods, _options(flags | rounding)
    return replace(options, in_process_proposer=methods, hidden_features=states_of(methods))


def _options(flags: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> ScorerOptions:
    """Return what a scorer's flags ask for; `own` are vLLM's. Raises `ConfigError`."""
    words = [*_words(flags), *(() if own is None else ("--", *_words(own)))]
    with naming_config():
        options = resolve(words)
    del options["exit_with_parent"]
    return ScorerOptions(**options)


def _engine(given: Arguments, others: Mapping[str, Any], *, on_gpu: bool) -> str:
    if given.engine not in ENGINES:
        raise ConfigError(f"engine={given.engine!r} must be one of {', '.join(ENGINES)}.")
    if given.engine == NATIVE or (given.engine == AUTO and not has_vllm()):
        return NATIVE  # which refuses what only vLLM serves
    folder = resolve_model(given.model, "target", tokenizer_only=True)
    wanted = Wanted.of(folder, on_gpu=on_gpu, num_devices=num_devices([*_words(others)]))
    if given.quantization not in (None, "none", *QUANTIZATIONS):
        wanted = replace(wanted, quantised=True)
    return choose(given.engine, wanted)


def _words(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments of vLLM's as flags of vLLM's."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            said = json.dumps(value) if isinstance(value, Mapping | list) else str(value)
            yield from (f"--{flag}", said)


def _dtype(given: Arguments, *, on_gpu: bool) -> str:
    """Return float32 on a CPU and the checkpoint's on a GPU, unless one is asked for."""
    name = str(given.dtype).removeprefix("torch.")
    name = {"half": "float16", "float": "float32"}.get(name, name)
    if name == "auto":
        name = "float32"
        if on_gpu:
            name = stored_dtype(resolve_model(given.model, "target", tokenizer_only=True))
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name} must be auto, float32, bfloat16 or float16.")
    return name
