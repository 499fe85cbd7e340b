"""Choose the fastest installed attention backend that computes a model exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
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

_NO_LATENTS = "it cannot expand the latents that this model caches"


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

    def shard(self, num_ranks: int) -> AttentionTraits:
        """Return the traits of one of `num_ranks` ranks, which share the heads evenly."""
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=self.num_kv_heads // num_ranks,
        )


def attention_traits(model: nn.Module) -> AttentionTraits:
    """Read the traits of a loaded `transformers` model."""
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
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """A backend that can be chosen."""

    module: str | None  # to be installed
    install: str
    why_not: Callable[[AttentionTraits, torch.device], str | None]
    """Returns the reason that a model or device does not fit, or None."""
    make: Callable[[AttentionTraits, torch.device], AttentionBackend]


@dataclass(frozen=True, slots=True)
class TreeFallback:
    """A backend without tree attention, and one for the steps with trees."""

    chains: AttentionBackend
    trees: AttentionBackend

    def __call__(self, batch: PackedBatch) -> StepAttention:
        return (self.chains if batch.trees is None else self.trees)(batch)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture steps without trees."""
        return is_capturable(self.chains)


def is_capturable(backend: AttentionBackend) -> bool:
    """Return whether a CUDA graph can capture its steps and replay them with other lengths."""
    return bool(getattr(backend, "capturable", False))


def choose_backend(
    name: str | None, traits: AttentionTraits, device: torch.device
) -> AttentionBackend:
    """Return the named backend, or the best that fits.

    Raises `ConfigError` if the named one is unknown, not installed or does not fit the model.
    """
    if name is not None:
        if name not in _CHOICES:
            known = ", ".join(_CHOICES)
            raise ConfigError(f"There is no attention backend {name!r}; there are {known}.")
        reason = _CHOICES[name].why_not(traits, device) or _missing(name)
        if reason is not None:
            raise ConfigError(f"Attention backend {name!r} cannot be used: {reason}.")
    else:
        name = next(
            each
            for each in _AUTOMATIC
            if not _CHOICES[each].why_not(traits, device) and not _missing(each)
        )
    logger.info("Attention runs with the backend %r.", name)
    return _CHOICES[name].make(traits, device)


def _missing(name: str) -> str | None:
    choice = _CHOICES[name]
    if choice.module is None or _installed(choice.module):
        return None
    return f"{choice.module} is not installed ({choice.install})"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def _needs_cuda(traits: AttentionTraits, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if traits.latent:
        return _NO_LATENTS
    return None


def _half_precision(traits: AttentionTraits, device: torch.device) -> str | None:
    if (reason := _needs_cuda(traits, device)) is not None:
        return reason
    if traits.dtype not in (torch.bfloat16, torch.float16):
        return (
            f"it computes in bfloat16 and float16, not {str(traits.dtype).removeprefix('torch.')}"
        )
    return None


def _wrong_head(traits: AttentionTraits, fits: Callable[[int], bool]) -> str | None:
    wrong = [dim for dim in sorted(traits.head_dims) if not fits(dim)]
    return f"it does not support heads of {wrong[0]} dimensions" if wrong else None


def _flash4(traits: AttentionTraits, device: torch.device) -> str | None:
    if (reason := _half_precision(traits, device)) is not None:
        return reason
    if torch.cuda.get_device_capability(device)[0] not in (9, 10, 11):
        return "FlashAttention-4 reads pages on Hopper and data-centre Blackwell only"
    largest = 256 if torch.cuda.get_device_capability(device)[0] == 9 else 128
    return _wrong_head(traits, lambda dim: dim <= largest and dim % 16 == 0)


def _flashinfer(traits: AttentionTraits, device: torch.device) -> str | None:
    if (reason := _half_precision(traits, device)) is not None:
        return reason
    if traits.sinks:
        return "it does not support attention sinks"
    return _wrong_head(traits, lambda dim: dim in (64, 128, 256))


def _triton(traits: AttentionTraits, device: torch.device) -> str | None:
    if (reason := _needs_cuda(traits, device)) is not None:
        return reason
    if traits.dtype is torch.float64:
        return "it computes in float32"
    return _wrong_head(traits, lambda dim: dim <= 256)


def _numba(traits: AttentionTraits, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it runs on CPU, not {device.type}"
    if traits.latent:
        return _NO_LATENTS
    if traits.softcap or traits.sinks:
        return "it supports neither softcap nor attention sinks"
    if traits.dtype is torch.float16:
        return "it does not read float16"
    return _wrong_head(traits, lambda dim: dim <= 1024 and dim % 32 == 0)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _make_flash4(traits: AttentionTraits, device: torch.device) -> AttentionBackend:
    from outrider.engine.cuda.attention.flash import Flash4Backend

    group = traits.num_heads // traits.num_kv_heads
    flash = Flash4Backend(traits.num_kv_heads, group, _multiprocessors(device))
    return TreeFallback(flash, _make_triton(traits, device))


def _make_flashinfer(traits: AttentionTraits, device: torch.device) -> AttentionBackend:
    from outrider.engine.cuda.attention.flashinfer import FlashInferBackend

    return TreeFallback(FlashInferBackend(device), _make_triton(traits, device))


def _make_triton(traits: AttentionTraits, device: torch.device) -> AttentionBackend:  # noqa: ARG001
    from outrider.engine.cuda.attention.triton import TritonBackend

    return TritonBackend(_multiprocessors(device))


def _make_numba(traits: AttentionTraits, device: torch.device) -> AttentionBackend:  # noqa: ARG001
    from outrider.engine.cpu.attention import NumbaAttention

    return NumbaAttention.backend(traits.dtype)


_CHOICES = {
    "flash": _Choice("flash_attn.cute", "pip install 'outrider[cuda]'", _flash4, _make_flash4),
    "flashinfer": _Choice(
        "flashinfer", "pip install 'outrider[flashinfer]'", _flashinfer, _make_flashinfer
    ),
    "triton": _Choice("triton", "it comes with torch for CUDA", _triton, _make_triton),
    "numba": _Choice("numba", "pip install numba", _numba, _make_numba),
    "sdpa": _Choice(None, "", lambda *_: None, lambda *_: SdpaAttention),
}
# FlashInfer is chosen by name only. It plans every step on the host, so no graph can capture it.
_AUTOMATIC = ("flash", "triton", "numba", "sdpa")
BACKEND_NAMES = tuple(_CHOICES)
