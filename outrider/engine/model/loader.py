"""Loads a checkpoint folder into a `PagedModel`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig

from outrider.engine.attention.backends import attention_traits, choose_backend
from outrider.engine.attention.base import ATTENTION_NAME
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.config_sizes import caches_latents, head_dim, layer_configs, num_kv_heads
from outrider.engine.model.linear import prepack_linears
from outrider.engine.model.llama import FusedLlama, fits
from outrider.engine.model.ops import LlamaOps, TorchOps
from outrider.engine.model.paged_model import PagedModel, Step, TransformersStep
from outrider.engine.model.parallel.leading_model import LeadingModel
from outrider.engine.model.parallel.ranks import RankGroup
from outrider.engine.model.parallel.shards import WHOLE, Sharding
from outrider.engine.model.selftest import check_against, eager_reference
from outrider.engine.model.supported_models import check_shardable, check_supported, max_exact_len
from outrider.errors import ConfigError
from outrider.features import FeatureSpec, parse_features

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    page_size: int,
    num_pages: int,
    max_model_len: int | None = None,
    device: torch.device = CPU,
    self_test: bool = True,
    attention_backend: str | None = None,
    features: FeatureSpec | None = None,
    group: RankGroup | None = None,
    int8_weights: bool = False,
) -> PagedModel:
    """Read a Hugging Face folder (config.json, safetensors) and makes it ready to run.

    With a `group`, this rank's shard of it: all ranks load at the same time with the same
    arguments, and then all but the leader must `follow`, whose self-test they take part in.

    Raises `ConfigError` for files that are missing or broken and for an `attention_backend` that
    cannot be used, and `UnsupportedModelError` for a model that this engine would not run exactly.
    """
    model = _read(folder, dtype, device, group)
    return build_paged_model(
        model,
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        self_test=self_test,
        attention_backend=attention_backend,
        features=features,
        group=group,
        int8_weights=int8_weights,
        name=folder.name,
    )


def build_paged_model(
    model: nn.Module,
    *,
    page_size: int,
    num_pages: int,
    max_model_len: int | None = None,
    self_test: bool = True,
    fused: bool = True,
    attention_backend: str | None = None,
    features: FeatureSpec | None = None,
    group: RankGroup | None = None,
    int8_weights: bool = False,
    name: str = "model",
) -> PagedModel:
    """Take over a loaded `transformers` model; `model` must not be used afterwards.

    `attention_backend` is a name of `backends.BACKEND_NAMES`, or None for the best that fits;
    `features` are hidden states to keep beside keys and values. `group`: the ranks among which
    `transformers` has sharded the model. `int8_weights`: where kernels for it are faster, weights
    are read as int8, and logits are close to the model's own, no longer equal but for roundings.
    """
    parts: Any = model.eval()
    check_supported(model)
    traits = attention_traits(model, page_size)
    if group is not None:
        traits = traits.shard(group.ranks.size)
    backend = choose_backend(attention_backend, traits, parts.device)
    length = limit = max_exact_len(model)
    if max_model_len is not None and max_model_len > limit:
        logger.warning("%s is served up to %d tokens, not %d.", name, limit, max_model_len)
    elif max_model_len is not None:
        length = max_model_len
    reference = None
    if self_test:
        reference = eager_reference(
            model, page_size=page_size, num_pages=num_pages, max_model_len=length
        )
    fused = fused and fits(model)
    pools = KVPools(
        num_pages + 1,  # the last one is for scratch
        page_size,
        parts.dtype,
        parts.device,
        num_layers=parts.config.num_hidden_layers if fused else None,
        features=features,
    )
    step: Step
    if fused:
        sharding = WHOLE if group is None else Sharding(group.ranks.rank, group.ranks.size)
        ops = choose_llama_ops(parts.device, parts.dtype, int8_weights=int8_weights)
        step = FusedLlama(model, pools, ops, length, sharding)
    else:
        if group is None:
            prepack_linears(model)
        parts.set_attn_implementation(ATTENTION_NAME)
        step = TransformersStep(model, pools)
    if group is not None:  # ranks of one machine choose their products one after another
        group.meet()
    leads = group is not None and group.ranks.leads
    make = partial(LeadingModel, group) if group is not None and leads else PagedModel
    paged = make(
        step,
        pools,
        backend,
        name=name,
        vocab_size=int(parts.config.get_text_config(decoder=True).vocab_size),
        max_model_len=length,
        eos_token_ids=_eos_token_ids(parts.config, getattr(parts, "generation_config", None)),
        dtype=parts.dtype,
        device=parts.device,
    )
    if reference is not None and (leads or group is None):
        check_against(paged, reference)
    return paged


def choose_llama_ops(
    device: torch.device, dtype: torch.dtype, *, int8_weights: bool = False
) -> LlamaOps:
    """The fastest that run there."""
    if device.type == "cpu" and dtype is not torch.float16:
        from outrider.engine.cpu.ops import NumbaOps

        return NumbaOps(dtype)
    if device.type == "cuda" and dtype is not torch.float64:
        from outrider.engine.cuda.llama_ops import TritonOps

        return TritonOps(int8=int8_weights)
    return TorchOps()


def _read(
    folder: Path, dtype: torch.dtype, device: torch.device, group: RankGroup | None
) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it holds no config.json.")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds no weights (*.safetensors).")
    # Its progress bars would run through the services' own lines of progress.
    transformers.utils.logging.disable_progress_bar()
    config = _config(folder)
    shards: dict[str, Any] = {}
    if group is not None:
        check_shardable(config, group.ranks.size)
        shards["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=group.ranks.size)
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, **shards
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"The model in {folder} cannot be read: {error}") from error
    if group is None:
        return model.to(device)
    placed: Any = model
    if placed.device != device:
        raise ConfigError(
            f"transformers shards over {placed.device.type}, not {device.type}: without "
            "CUDA_VISIBLE_DEVICES= a machine with GPUs cannot share a model out over CPUs."
        )
    return model


def _eos_token_ids(*configs: Any) -> frozenset[int]:
    found: set[int] = set()
    for source in configs:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)


def kv_bytes_per_page(
    folder: Path,
    *,
    dtype: torch.dtype,
    page_size: int,
    features: FeatureSpec | None = None,
    num_ranks: int = 1,
) -> int:
    """Bytes of key/value memory per page over all layers, and of `features`, on one rank.

    From config.json alone: lets a service turn a memory budget into `num_pages` before it loads
    the weights.
    """
    config = read_text_config(folder)
    width = _kv_width(config)
    if not caches_latents(config):  # latents are on every rank
        width //= num_ranks
    per_token = width * dtype.itemsize
    return page_size * (per_token + (0 if features is None else features.row_bytes))


def count_pages(kv_cache_memory: int, page_bytes: int) -> int:
    """Pages that so many MiB hold. Raises `ConfigError` if not even one."""
    num_pages = kv_cache_memory * 2**20 // page_bytes
    if num_pages < 1:
        raise ConfigError(
            f"--kv-cache-memory {kv_cache_memory} holds not one page of {page_bytes} bytes."
        )
    return num_pages


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """Ids that end a text, as the model in a folder would be loaded with. Raises `ConfigError`."""
    path = folder / "generation_config.json"
    try:
        generation = GenerationConfig.from_pretrained(folder) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return _eos_token_ids(_config(folder), generation)


def read_features(folder: Path, text: str) -> FeatureSpec:
    """What `--hidden-features` asks of the model in a folder. Raises `ConfigError`."""
    config = read_text_config(folder)
    return parse_features(text, int(config.num_hidden_layers), int(config.hidden_size))


def read_text_config(folder: Path) -> Any:
    """Of the decoder in a folder, as `transformers` knows it: complete. Raises `ConfigError`."""
    return _config(folder).get_text_config(decoder=True)


def _config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"The config.json in {folder} cannot be read: {error}") from error


def _kv_width(config: Any) -> int:
    """Numbers kept per token, all layers together."""
    if caches_latents(config):
        return int(config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim))
    return sum(2 * num_kv_heads(layer) * head_dim(layer) for layer in layer_configs(config))
