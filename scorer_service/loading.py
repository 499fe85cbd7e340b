"""Loads the model with its cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from outrider import start_times
from outrider.engine.kv_cache.memory import fitting
from outrider.engine.model.device_reader import DeviceReader
from outrider.engine.model.loader import (
    ModelOptions,
    Prepare,
    count_pages,
    kv_bytes_per_page,
    load_model,
    read_features,
)
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import Runner, StepRunner
from outrider.errors import ConfigError
from outrider.rpc import runtime
from scorer_service.config import ScorerOptions


def load(
    folder: Path, options: ScorerOptions, build_first: Callable[[], None] = lambda: None
) -> tuple[PagedModel, StepRunner | None, list[tuple[int, int, float]]]:
    """Return the model with its cache, its runner if torch alone is not, and step times.

    The step times are (rows, tokens, seconds) of captured steps. `build_first` loads what shares
    the device with the model: keys and values get the memory that is left.
    """
    device, dtype = _device(options.device), getattr(torch, options.dtype)
    asked = options.hidden_features
    features = None if asked is None else read_features(folder, asked)
    num_pages: int | None = None
    if options.kv_cache_memory is not None:
        page_bytes = kv_bytes_per_page(
            folder,
            dtype=dtype,
            page_size=options.page_size,
            features=features,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        num_pages = count_pages(options.kv_cache_memory, page_bytes)

    @fitting("The model", options.kv_cache_memory)
    def read(
        num_pages: int, reader: DeviceReader | None = None, prepare: Prepare | None = None
    ) -> PagedModel:
        settings = ModelOptions(
            page_size=options.page_size,
            num_pages=num_pages,
            max_model_len=options.max_model_len,
            attention_backend=options.attention_backend,
            features=features,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        return load_model(
            folder, settings, dtype=dtype, device=device, reader=reader, prepare=prepare
        )

    if device.type == "cuda":
        return _load_on_gpu(folder, options, device, read, num_pages, build_first)
    assert num_pages is not None, "a CPU has a default"
    build_first()
    return _with_room(read(num_pages), options), None, []


def _load_on_gpu(
    folder: Path,
    options: ScorerOptions,
    device: torch.device,
    read: Callable[[int, DeviceReader | None, Prepare], PagedModel],
    num_pages: int | None,
    build_first: Callable[[], None],
) -> tuple[PagedModel, StepRunner, list[tuple[int, int, float]]]:
    # Imported here: without a CUDA device there may be no Triton.
    from outrider.engine.cuda.sampling import sample
    from outrider.engine.model.memory_budget import TRIAL_PAGES, DeviceMemory, claim_activations
    from scorer_service.device import StepLimits, capture_steps, compile_steps, size_cache

    progress = partial(runtime.progress, "scorer")
    if device.index is not None:
        torch.cuda.set_device(device)
    limits = StepLimits(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.num_speculative_tokens,
        # Methods that read hidden states draft trees. Trees of other methods run eagerly.
        trees=options.hidden_features is not None,
        synthetic_acceptance_rates=options.synthetic_acceptance_rates,
    )
    progress(
        "then it compiles and chooses kernels, tests the model and captures graphs: about half a "
        "minute at a first start, ten seconds later"
    )
    memory = None
    if num_pages is None:
        memory = DeviceMemory(device, options.gpu_memory_utilization)
    reader: DeviceReader | None = None
    with fitting("The model", options.kv_cache_memory):
        if options.quantization is None:  # else not all weights are on the device at once
            reader = DeviceReader(folder, device)  # beside what is built first
    build_first()
    prepare = partial(compile_steps, limits=limits, say=progress)
    model = read(num_pages or TRIAL_PAGES, reader, prepare)
    if memory is None:
        _with_room(model, options)
    else:
        with start_times.phase("memory"):
            size_cache(memory, model, limits, progress)
    with start_times.phase("steps"):
        captured = capture_steps(model, limits, progress)
        claim_activations(
            model,
            sample,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        if captured is None:
            return model, Runner(model, sample=sample), []
        return model, captured, captured.trial_times()


def _device(name: str) -> torch.device:
    """Raise `ConfigError` if there is no such device."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdecimal() or name == kind):
        raise ConfigError(f"--device {name} is unknown: give cpu, cuda or, say, cuda:1.")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= count:
        raise ConfigError(f"--device {name}: torch finds {count or 'no'} CUDA devices.")
    return torch.device(name)


def _with_room(model: PagedModel, options: ScorerOptions) -> PagedModel:
    """Raise `ConfigError` unless the cache holds one request of the greatest length."""
    tokens = model.num_pages * options.page_size
    if tokens < model.max_model_len:
        needed = -(-model.max_model_len * model.kv_bytes_per_page // options.page_size)
        raise ConfigError(
            f"--kv-cache-memory {options.kv_cache_memory} holds {tokens} tokens, less than one "
            f"request of {model.max_model_len}: give at least {needed // 2**20 + 1} MiB or lower "
            "--max-model-len."
        )
    return model
