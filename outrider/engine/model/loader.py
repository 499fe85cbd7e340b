"""Load a checkpoint folder into a `PagedModel`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider import start_times
from outrider.engine.attention.base import ATTENTION_NAME
from outrider.engine.kv_cache import fp8
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.ops import LlamaOps, TorchOps
from outrider.engine.model.attention_backends import attention_traits, choose_backend
from outrider.engine.model.checkpoint import check_finite, read_config, read_model
from outrider.engine.model.config_sizes import caches_latents, head_dim, layer_configs, num_kv_heads
from outrider.engine.model.device_reader import DeviceReader
from outrider.engine.model.llama import FusedLlama, fits
from outrider.engine.model.pack import prepack_linears
from outrider.engine.model.paged_model import ModelInfo, Network, PagedModel
from outrider.engine.model.quantization import (
    check_quantizable,
    describe,
    read_rounded,
    read_stored,
)
from outrider.engine.model.selftest import check_against, eager_reference
from outrider.engine.model.supported_models import (
    check_supported,
    check_supported_config,
    max_exact_len,
)
from outrider.engine.model.transformers_network import TransformersNetwork
from outrider.errors import ConfigError
from outrider.features import FeatureSpec, parse_features
from outrider.models.eos import read_eos_token_ids
from outrider.models.weight_files import check_folder, quantised_as

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
Prepare = Callable[[PagedModel], None]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Settings of a `PagedModel`."""

    page_size: int
    num_pages: int
    max_model_len: int | None = None
    """None: as long as the model is exact."""
    attention_backend: str | None = None
    """A name of `BACKEND_NAMES`; None: the best that fits."""
    features: FeatureSpec | None = None
    """Hidden states to keep beside keys and values."""
    int8_weights: bool = False
    """Read weights as int8 where that is faster; logits are then close to the model's own."""
    quantization: str | None = None
    """A name of `quantization.DTYPES`: round the weights of linear layers, which is the model."""
    kv_cache_dtype: str = "auto"
    """A name of `KV_CACHE_DTYPES`."""
    fused: bool = True
    """Run the fused step for the Llama family."""
    self_test: bool = True


def load_model(
    folder: Path,
    options: ModelOptions,
    *,
    dtype: torch.dtype,
    device: torch.device = CPU,
    reader: DeviceReader | None = None,
    prepare: Prepare | None = None,
) -> PagedModel:
    """Read a Hugging Face folder (config.json, safetensors) and make it ready to run.

    `reader` may already be reading the weights to the device. `prepare` may compile kernels.
    Raises `ConfigError` for files that are missing or broken and for an attention backend that
    cannot be used, and `UnsupportedModelError` for a model that this engine would not run exactly.
    """
    eos_token_ids = read_eos_token_ids(folder)
    with start_times.phase("weights"):
        model = _read(folder, options.quantization, dtype, device, reader)
    return build_paged_model(
        model, options, name=folder.name, eos_token_ids=eos_token_ids, prepare=prepare
    )


def build_paged_model(
    model: nn.Module,
    options: ModelOptions,
    *,
    name: str = "model",
    eos_token_ids: frozenset[int] = frozenset(),
    prepare: Prepare | None = None,
) -> PagedModel:
    """Take over a loaded `transformers` model; `model` must not be used afterwards.

    `eos_token_ids` end a text. `prepare` comes before the self-test. Raises `ConfigError` for an
    attention backend or a dtype of the cache that cannot be used.
    """
    parts: Any = model.eval()
    check_supported(model)
    float8 = options.kv_cache_dtype == "fp8"
    traits = attention_traits(model, float8_cache=float8)
    backend = choose_backend(options.attention_backend, traits, parts.device)
    length = _bounded_length(model, options.max_model_len, name)
    reference = None
    if options.self_test:
        with start_times.phase("self-test"):
            reference = eager_reference(
                model,
                page_size=options.page_size,
                num_pages=options.num_pages,
                max_model_len=length,
            )
    network, pools = _network(model, options, length)
    info = ModelInfo(
        name=name,
        vocab_size=int(parts.config.get_text_config(decoder=True).vocab_size),
        max_model_len=length,
        eos_token_ids=eos_token_ids,
        dtype=parts.dtype,
        device=parts.device,
    )
    paged = PagedModel(network, pools, backend, info)
    if prepare is not None:
        prepare(paged)
    if reference is not None:
        with start_times.phase("self-test"):
            check_against(paged, reference, float8_cache=float8)
    return paged


def _network(model: nn.Module, options: ModelOptions, length: int) -> tuple[Network, KVPools]:
    """Return the model's layers over the pools that they allocate."""
    parts: Any = model
    fused = options.fused and fits(model)
    pools = KVPools(
        options.num_pages + 1,  # the last one is the scratch page
        options.page_size,
        parts.dtype,
        parts.device,
        num_layers=parts.config.num_hidden_layers if fused else None,
        features=options.features,
        float8=options.kv_cache_dtype == "fp8",
    )
    if fused:
        ops = choose_llama_ops(parts.device, parts.dtype, int8_weights=options.int8_weights)
        return FusedLlama(model, pools, ops, length), pools
    prepack_linears(model)
    parts.set_attn_implementation(ATTENTION_NAME)
    return TransformersNetwork(model, pools), pools


def _bounded_length(model: nn.Module, wanted: int | None, name: str) -> int:
    limit = max_exact_len(model)
    if wanted is None:
        return limit
    if wanted > limit:
        logger.warning("%s is served up to %d tokens, not %d.", name, limit, wanted)
    return min(wanted, limit)


def choose_llama_ops(
    device: torch.device, dtype: torch.dtype, *, int8_weights: bool = False
) -> LlamaOps:
    """Return the fastest operations for a device and dtype."""
    if device.type == "cpu" and dtype is not torch.float16:
        from outrider.engine.cpu.ops import NumbaOps

        return NumbaOps(dtype, int8=int8_weights)
    if device.type == "cuda" and dtype is not torch.float64:
        from outrider.engine.cuda.llama_ops import TritonOps

        return TritonOps(int8=int8_weights)
    return TorchOps()


def check_config(folder: Path) -> Any:
    """Return the config of a folder of which files and config.json can be served.

    Raises `ConfigError` and `UnsupportedModelError`.
    """
    check_folder(folder)
    config = read_config(folder)
    check_supported_config(config)
    return config


def _read(
    folder: Path,
    quantization: str | None,
    dtype: torch.dtype,
    device: torch.device,
    reader: DeviceReader | None,
) -> nn.Module:
    config = check_config(folder)
    stored = quantised_as(folder)
    if stored is not None:
        if quantization is not None:
            raise ConfigError(
                f"{folder} is quantised already ({stored.name}): leave --quantization out."
            )
        check_quantizable(config, f"{stored.name} weights", dtype, device)
        reader = reader or DeviceReader(folder, device)
        model = read_stored(folder, config, stored, dtype, reader)
    elif quantization is not None:
        check_quantizable(config, f"--quantization {quantization}", dtype, device)
        model = read_rounded(folder, config, quantization, dtype, device)
    elif device.type == "cuda":
        reader = reader or DeviceReader(folder, device)
        model = read_model(folder, config, dtype, reader.tensors())
        # transformers warmed the allocator up with as much, for tensors that it does not make.
        torch.cuda.empty_cache()
    else:
        model = read_model(folder, config, dtype)
    check_finite(model, folder)
    if stored is not None or quantization is not None:
        logger.info("%s", describe(model))
    return model


def kv_bytes_per_page(
    folder: Path,
    *,
    dtype: torch.dtype,
    page_size: int,
    features: FeatureSpec | None = None,
    kv_cache_dtype: str = "auto",
) -> int:
    """Return the bytes of a page over all layers, `features` included.

    It reads config.json alone, so that a service knows `num_pages` before it loads the weights.
    """
    size = kv_bytes_per_token(read_text_config(folder), dtype, kv_cache_dtype)
    return page_size * (size + (0 if features is None else features.row_bytes))


def kv_bytes_per_token(config: Any, dtype: torch.dtype, kv_cache_dtype: str) -> int:
    """Return the bytes of a token's keys and values over all layers of a model's text config."""
    if caches_latents(config):
        heads = int(config.num_hidden_layers)  # a latent, and the rotated part of its keys
        width = heads * (config.kv_lora_rank + config.qk_rope_head_dim)
    else:
        layers = layer_configs(config)
        heads = sum(num_kv_heads(layer) for layer in layers)
        width = sum(2 * num_kv_heads(layer) * head_dim(layer) for layer in layers)
    if kv_cache_dtype == "fp8":
        return int(width) * fp8.NUMBERS.itemsize + 2 * heads * fp8.SCALES.itemsize
    return int(width) * dtype.itemsize


def count_pages(kv_cache_memory: int, page_bytes: int) -> int:
    """Return the pages that so many MiB hold. Raises `ConfigError` if there is not even one."""
    num_pages = kv_cache_memory * 2**20 // page_bytes
    if num_pages < 1:
        raise ConfigError(
            f"--kv-cache-memory {kv_cache_memory} holds not one page of {page_bytes} bytes."
        )
    return num_pages


def read_features(folder: Path, text: str) -> FeatureSpec:
    """Parse `--hidden-features` for the model in a folder. Raises `ConfigError`."""
    config = read_text_config(folder)
    return parse_features(text, int(config.num_hidden_layers), int(config.hidden_size))


def read_text_config(folder: Path) -> Any:
    """Read the decoder's config in a folder, completed by `transformers`. Raises `ConfigError`."""
    return read_config(folder).get_text_config(decoder=True)
