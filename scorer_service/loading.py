"""From the command line to a model with its cache, on every rank of a replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider.engine.kv_cache.memory import fitting
from outrider.engine.model.loader import (
    ModelOptions,
    count_pages,
    kv_bytes_per_page,
    load_model,
    read_features,
)
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.model.parallel.ranks import RankGroup
from outrider.engine.runner import Runner, StepRunner
from outrider.errors import ConfigError
from outrider.rpc import runtime

if TYPE_CHECKING:
    from scorer_service.app import Options


def join(options: Options) -> RankGroup | None:
    """Meets the other ranks of the replica, if there are any."""
    ranks = options.ranks
    if ranks is None:
        return None
    device = ranks.device(options.device)
    return RankGroup(ranks, device, start_timeout_s=options.start_timeout)


def load(
    folder: Path,
    options: Options,
    group: RankGroup | None,
    beside: Callable[[], None] = lambda: None,
) -> tuple[PagedModel, StepRunner | None, list[tuple[int, int, float]]]:
    """The model with its cache; what runs its steps if not torch alone; and how long recorded ones
    take: (rows, tokens, seconds). All ranks of a group load at the same time. What the model shares
    the device with is loaded by `beside`, and first: keys and values get what is left.
    """
    dtype = getattr(torch, options.dtype)
    device = _device(options.device) if group is None else group.device
    asked = options.hidden_features
    features = None if asked is None else read_features(folder, asked)

    @fitting("The model", options.kv_cache_memory)
    def load_with(num_pages: int) -> PagedModel:
        try:
            return load_model(
                folder,
                ModelOptions(
                    page_size=options.page_size,
                    num_pages=num_pages,
                    max_model_len=options.max_model_len,
                    attention_backend=options.attention_backend,
                    features=features,
                ),
                dtype=dtype,
                device=device,
                group=group,
            )
        except RuntimeError as error:
            if group is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise group.failed("loading", error) from error

    def load_given() -> PagedModel:
        page_bytes = kv_bytes_per_page(
            folder,
            dtype=dtype,
            page_size=options.page_size,
            features=features,
            num_ranks=1 if group is None else group.ranks.size,
        )
        assert options.kv_cache_memory is not None, "a CPU has a default"
        num_pages = count_pages(options.kv_cache_memory, page_bytes)
        return _with_room(
            load_with(num_pages if group is None else group.least(num_pages)), options
        )

    if device.type != "cuda":
        beside()
        return load_given(), None, []
    # Imported here: without a CUDA device there may be no Triton.
    from outrider.engine.cuda.sampling import sample
    from outrider.engine.model.memory_budget import TRIAL_PAGES, DeviceMemory, claim_activations
    from scorer_service.device import StepLimits, capture_steps, size_cache

    def say(message: str) -> None:
        runtime.progress("scorer", message)

    if device.index is not None:
        torch.cuda.set_device(device)
    limits = StepLimits(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.num_speculative_tokens,
        # Methods that read hidden states draft trees; what others send of them runs eagerly.
        trees=features is not None,
    )
    if options.kv_cache_memory is None:
        memory = DeviceMemory(device, options.gpu_memory_utilization)
        if group is not None:
            memory.limit = group.least(memory.limit)
        beside()
        model = load_with(TRIAL_PAGES)
        if group is None or group.ranks.leads:  # nobody needs more memory than the leader
            size_cache(memory, model, limits, say)
    else:
        beside()
        model = load_given()
    if group is not None:
        say("a model on several ranks: every step runs eagerly")
        return model, None, []
    recorded = capture_steps(model, limits, say)
    claim_activations(
        model,
        sample,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    if recorded is None:
        return model, Runner(model, sample=sample), []
    return model, recorded, recorded.trial_times()


def _device(name: str) -> torch.device:
    """Raise `ConfigError` if there is no such device."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdecimal() or name == kind):
        raise ConfigError(f"--device {name} is unknown: give cpu, cuda or, say, cuda:1.")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= count:
        raise ConfigError(f"--device {name}: torch finds {count or 'no'} CUDA devices.")
    return torch.device(name)


def _with_room(model: PagedModel, options: Options) -> PagedModel:
    """The model, if its cache holds one request of the greatest length."""
    tokens = model.num_pages * options.page_size
    if tokens < model.max_model_len:
        needed = -(-model.max_model_len * model.kv_bytes_per_page // options.page_size)
        raise ConfigError(
            f"--kv-cache-memory {options.kv_cache_memory} holds {tokens} tokens, less than one "
            f"request of {model.max_model_len}: give at least {needed // 2**20 + 1} MiB or lower "
            "--max-model-len."
        )
    return model
