"""Choose the fastest installed attention backend that computes a model exactly."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from outrider.engine.attention.base import AttentionBackend, StepAttention
from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.batch import PackedBatch
from outrider.engine.model.config_sizes import caches_latents, head_dim, layer_configs, num_kv_heads
from outrider.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """Properties of the attention of a model's layers, taken together."""

    head_dims: frozenset[int]
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype
    softcap: bool
    sinks: bool
    latent: bool
    float8_cache: bool = False


def attention_traits(model: nn.Module, *, float8_cache: bool = False) -> AttentionTraits:
    """Return the traits of a loaded `transformers` model with its cache."""
    parts: Any = model
    config = parts.config.get_text_config(decoder=True)
    return AttentionTraits(
        head_dims=frozenset(map(head_dim, layer_configs(config))),
        num_heads=int(config.num_attention_heads),
        num_kv_heads=num_kv_heads(config),
        dtype=parts.dtype,
        softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        latent=caches_latents(config),
        float8_cache=float8_cache,
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """A backend that can be chosen, and the models that it supports."""

    make: Callable[[AttentionTraits, torch.device], AttentionBackend]
    module: str  # to be installed
    install: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    supports_head: Callable[[int, torch.device], bool]  # of this width
    softcap: bool = True
    sinks: bool = True
    float8_cache: bool = True
    capabilities: tuple[int, ...] = ()  # major compute capabilities; empty: any

    def why_not(self, traits: AttentionTraits, device: torch.device) -> str | None:
        """Return the reason that a model or device does not fit, or None."""
        if device.type != self.device:
            return f"it needs a {self.device.upper()} device, not {device.type}"
        if traits.latent:
            return "it cannot expand the latents that this model caches"
        if traits.dtype not in self.dtypes:
            names = [str(dtype).removeprefix("torch.") for dtype in (*self.dtypes, traits.dtype)]
            return f"it computes in {', '.join(names[:-1])}, not {names[-1]}"
        if traits.softcap and not self.softcap:
            return "it does not support softcap"
        if traits.sinks and not self.sinks:
            return "it does not support attention sinks"
        if traits.float8_cache and not self.float8_cache:
            return "it reads no float8 keys and values"
        if self.capabilities and torch.cuda.get_device_capability(device)[0] not in (
            self.capabilities
        ):
            return f"it needs a compute capability of {' or '.join(map(str, self.capabilities))}"
        wrong = [dim for dim in sorted(traits.head_dims) if not self.supports_head(dim, device)]
        return f"it does not support heads of {wrong[0]} dimensions" if wrong else None

    def missing(self) -> str | None:
        """Return how to install the package if it is missing."""
        with contextlib.suppress(ModuleNotFoundError):  # of a package in which the module would be
            if find_spec(self.module) is not None:
                return None
        return f"{self.module} is not installed ({self.install})"


@dataclass(frozen=True, slots=True)
class TreeFallback:
    """A backend without tree attention, and one for the steps with trees."""

    chains: AttentionBackend
    trees: AttentionBackend

    def __call__(self, batch: PackedBatch) -> StepAttention:
        return (self.chains if batch.trees is None else self.trees)(batch)

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph can capture steps without trees."""
        return is_capturable(self.chains)


def is_capturable(backend: AttentionBackend) -> bool:
    """Return whether a CUDA graph can capture its steps and replay them with other lengths."""
    return bool(getattr(backend, "capturable", False))


def choose_backend(
    name: str | None, traits: AttentionTraits, device: torch.device
) -> AttentionBackend:
    """Return the named backend, or the best that fits.

    Raises `ConfigError` if the named one is unknown, not installed or does not fit the model, and
    where the device has no float8 for a cache of it.
    """
    on_gpu = device.type == "cuda"
    if traits.float8_cache and on_gpu and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or more: leave it out."
        )
    if name is None:
        name = next(each for each in BACKEND_NAMES if _refusal(each, traits, device) is None)
    elif name not in BACKEND_NAMES:
        known = ", ".join(BACKEND_NAMES)
        raise ConfigError(f"There is no attention backend {name!r}; there are {known}.")
    elif (reason := _refusal(name, traits, device)) is not None:
        raise ConfigError(f"Attention backend {name!r} cannot be used: {reason}.")
    logger.info("Attention runs with the backend %r.", name)
    return SdpaAttention if name == _SDPA else _CHOICES[name].make(traits, device)


def _refusal(name: str, traits: AttentionTraits, device: torch.device) -> str | None:
    if name == _SDPA:
        return None
    choice = _CHOICES[name]
    return choice.why_not(traits, device) or choice.missing()


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _make_flash4(traits: AttentionTraits, device: torch.device) -> AttentionBackend:
    from outrider.engine.cuda.attention.flash import Flash4Backend

    group = traits.num_heads // traits.num_kv_heads
    flash = Flash4Backend(group, _multiprocessors(device))
    return TreeFallback(flash, _make_triton(traits, device))


def _make_triton(traits: AttentionTraits, device: torch.device) -> AttentionBackend:  # noqa: ARG001
    from outrider.engine.cuda.attention.triton import TritonBackend

    return TritonBackend(_multiprocessors(device))


def _make_numba(traits: AttentionTraits, device: torch.device) -> AttentionBackend:  # noqa: ARG001
    from outrider.engine.cpu.attention import NumbaAttention

    return NumbaAttention.backend(traits.dtype)


def _supports_flash4_head(dim: int, device: torch.device) -> bool:
    largest = 256 if torch.cuda.get_device_capability(device)[0] == 9 else 128
    return dim <= largest and dim % 16 == 0


_HALF = (torch.bfloat16, torch.float16)
_CHOICES = {
    "flash": _Choice(
        _make_flash4,
        "flash_attn.cute",
        "pip install 'outrider[cuda]'",
        "cuda",
        _HALF,
        _supports_flash4_head,
        float8_cache=False,
        capabilities=(9, 10, 11),
    ),
    "triton": _Choice(
        _make_triton,
        "triton",
        "it comes with torch for CUDA",
        "cuda",
        (*_HALF, torch.float32),
        lambda dim, _: dim <= 256,
    ),
    "numba": _Choice(
        _make_numba,
        "numba",
        "pip install numba",
        "cpu",
        (torch.bfloat16, torch.float32, torch.float64),
        lambda dim, _: dim <= 1024 and dim % 32 == 0,
        softcap=False,
        sinks=False,
    ),
}
_SDPA = "sdpa"  # for all models and devices
BACKEND_NAMES = (*_CHOICES, _SDPA)  # from the best to the one that always fits
