"""Which attention a model runs with: the fastest that is installed and computes it exactly."""

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

_FLASH3 = "flash_attn_interface"


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """What a model's layers ask of attention, all layers together."""

    head_dims: frozenset[int]
    num_heads: int
    num_kv_heads: int
    page_size: int
    dtype: torch.dtype
    softcap: bool
    sinks: bool
    latent: bool

    def shard(self, num_ranks: int) -> AttentionTraits:
        """Of the heads that one of `num_ranks` ranks has; they divide them evenly."""
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=self.num_kv_heads // num_ranks,
        )


def attention_traits(model: nn.Module, page_size: int) -> AttentionTraits:
    """Read them from a loaded `transformers` model."""
    parts: Any = model
    config = parts.config.get_text_config(decoder=True)
    return AttentionTraits(
        head_dims=frozenset(map(head_dim, layer_configs(config))),
        num_heads=int(config.num_attention_heads),
        num_kv_heads=num_kv_heads(config),
        page_size=page_size,
        dtype=parts.dtype,
        softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        latent=caches_latents(config),
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """`why_not` gives the reason that a model or device does not fit, or None."""

    modules: tuple[str, ...]  # of which one must be there
    install: str
    why_not: Callable[[AttentionTraits, torch.device], str | None]
    make: Callable[[AttentionTraits, torch.device], AttentionBackend]


@dataclass(frozen=True, slots=True)
class TreesElsewhere:
    """A backend whose kernels know no trees, and one for the steps that hold some."""

    chains: AttentionBackend
    trees: AttentionBackend

    def __call__(self, batch: PackedBatch) -> StepAttention:
        return (self.chains if batch.trees is None else self.trees)(batch)

    @property
    def capturable(self) -> bool:
        """Whether steps without trees can be recorded."""
        return is_capturable(self.chains)


def is_capturable(backend: AttentionBackend) -> bool:
    """Whether its steps can be captured in a CUDA graph and replayed with other lengths."""
    return bool(getattr(backend, "capturable", False))


def choose_backend(
    name: str | None, traits: AttentionTraits, device: torch.device
) -> AttentionBackend:
    """The backend of that name, or (None) the best that fits.

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
    if not choice.modules or any(_installed(module) for module in choice.modules):
        return None
    return f"{' or '.join(choice.modules)} is not installed ({choice.install})"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that the module would be in
        return False


def _needs_cuda(traits: AttentionTraits, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if traits.latent:
        return "this model caches latents, which it cannot expand"
    return None


def _half_precision(traits: AttentionTraits, device: torch.device) -> str | None:
    if (reason := _needs_cuda(traits, device)) is not None:
        return reason
    if traits.dtype not in (torch.bfloat16, torch.float16):
        return (
            f"it computes in bfloat16 and float16, not {str(traits.dtype).removeprefix('torch.')}"
        )
    return None


def _heads_fit(traits: AttentionTraits, largest: int, multiple: int) -> str | None:
    wrong = sorted(dim for dim in traits.head_dims if dim > largest or dim % multiple)
    return f"it has no heads of {wrong[0]} dimensions" if wrong else None


def _flash4(traits: AttentionTraits, device: torch.device) -> str | None:
    if (reason := _half_precision(traits, device)) is not None:
        return reason
    if torch.cuda.get_device_capability(device)[0] not in (9, 10, 11):
        return "FlashAttention-4 reads pages on Hopper and data-centre Blackwell only"
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return _heads_fit(traits, 256 if hopper else 128, 16)


def _classic(traits: AttentionTraits, device: torch.device) -> str | None:
    if (reason := _half_precision(traits, device)) is not None:
        return reason
    if traits.sinks:
        return "it knows no attention sinks"
    if not _installed(_FLASH3) and traits.page_size % 256:
        return "flash_attn 2 needs --page-size to be a multiple of 256"
    return _heads_fit(traits, 256, 8)


def _flashinfer(traits: AttentionTraits, device: torch.device) -> str | None:
    if (reason := _half_precision(traits, device)) is not None:
        return reason
    if traits.sinks:
        return "it knows no attention sinks"
    wrong = sorted(traits.head_dims - {64, 128, 256})
    return f"it has no heads of {wrong[0]} dimensions" if wrong else None


def _triton(traits: AttentionTraits, device: torch.device) -> str | None:
    if (reason := _needs_cuda(traits, device)) is not None:
        return reason
    if traits.dtype is torch.float64:
        return "it computes in float32 inside"
    return _heads_fit(traits, 256, 1)


def _numba(traits: AttentionTraits, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it runs on CPU, not {device.type}"
    if traits.latent:
        return "this model caches latents, which it cannot expand"
    if traits.softcap or traits.sinks:
        return "it knows no softcap and no attention sinks"
    if traits.dtype is torch.float16:
        return "it does not read float16"
    return _heads_fit(traits, 1024, 32)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _make_flash4(traits: AttentionTraits, device: torch.device) -> AttentionBackend:
    from outrider.engine.cuda.attention.flash import Flash4Backend

    group = traits.num_heads // traits.num_kv_heads
    flash = Flash4Backend(traits.num_kv_heads, group, _multiprocessors(device))
    return TreesElsewhere(flash, _make_triton(traits, device))


def _make_classic(traits: AttentionTraits, device: torch.device) -> AttentionBackend:
    from outrider.engine.cuda.attention.flash import Flash2Attention, Flash3Attention

    flash = Flash3Attention if _installed(_FLASH3) else Flash2Attention
    return TreesElsewhere(flash, _make_triton(traits, device))


def _make_flashinfer(traits: AttentionTraits, device: torch.device) -> AttentionBackend:
    from outrider.engine.cuda.attention.flashinfer import FlashInferBackend

    return TreesElsewhere(FlashInferBackend(device), _make_triton(traits, device))


def _make_triton(traits: AttentionTraits, device: torch.device) -> AttentionBackend:  # noqa: ARG001
    from outrider.engine.cuda.attention.triton import TritonBackend

    return TritonBackend(_multiprocessors(device))


def _make_numba(traits: AttentionTraits, device: torch.device) -> AttentionBackend:  # noqa: ARG001
    from outrider.engine.cpu.attention import NumbaAttention

    return NumbaAttention.backend(traits.dtype)


_CHOICES = {
    "flash": _Choice(("flash_attn.cute",), "pip install 'outrider[cuda]'", _flash4, _make_flash4),
    "flash_attn": _Choice(
        (_FLASH3, "flash_attn.flash_attn_interface"),
        "pip install flash-attn",
        _classic,
        _make_classic,
    ),
    "flashinfer": _Choice(
        ("flashinfer",), "pip install 'outrider[flashinfer]'", _flashinfer, _make_flashinfer
    ),
    "triton": _Choice(("triton",), "it comes with torch for CUDA", _triton, _make_triton),
    "numba": _Choice(("numba",), "pip install numba", _numba, _make_numba),
    "sdpa": _Choice((), "", lambda *_: None, lambda *_: SdpaAttention),
}
# FlashInfer only by name: it plans every step on the host, and outside a captured graph.
_AUTOMATIC = ("flash", "flash_attn", "triton", "numba", "sdpa")
BACKEND_NAMES = tuple(_CHOICES)
