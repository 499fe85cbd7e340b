"""Build the method that runs a small language model."""

from __future__ import annotations

import torch

from outrider.drafting.building.config import DraftModelConfig, Say
from outrider.drafting.building.loops import capture_loops, loop_shapes
from outrider.drafting.building.weights import PAGE_SIZE, choose_dtype, load_masks, prepare_device
from outrider.drafting.cpu.llama_chains import LlamaChains
from outrider.drafting.draft_model.loops import EagerForks
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.drafters import ChainDrafter, ForkDrafter
from outrider.drafting.proposer import ProposerLimits
from outrider.engine.kv_cache.memory import fitting
from outrider.engine.model.loader import ModelOptions, count_pages, kv_bytes_per_page, load_model
from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import hash_if_any


def build_draft_model(
    method: DraftModelConfig, max_sessions: int, prefill_budget: int, say: Say
) -> tuple[DraftModelProposer, str]:
    """Return the method, not warmed up, and its tokenizer's hash (empty if none).

    Raises `ConfigError` and `UnsupportedModelError`.
    """
    prepare_device(method)
    folder = resolve_model(method.model, "draft")
    dtype = choose_dtype(method, on_cpu=torch.float32)
    say(f"loading draft model {folder}")
    per_page = kv_bytes_per_page(folder, dtype=dtype, page_size=PAGE_SIZE)
    options = ModelOptions(
        page_size=PAGE_SIZE,
        num_pages=count_pages(method.kv_cache_memory, per_page),
        max_model_len=method.max_model_len,
        attention_backend=method.attention_backend,
        int8_weights=method.int8_weights,  # with fp8, of a tied output layer
        quantization="fp8" if method.quantization == "fp8" else None,
    )
    with fitting("The draft model", method.kv_cache_memory):
        model = load_model(folder, options, dtype=dtype, device=torch.device(method.device))
    limits = ProposerLimits(
        max_sessions=max_sessions,
        max_draft_tokens=method.max_draft_tokens,
        max_branches=method.max_branches,
        prefill_budget=prefill_budget,
    )
    chain_drafter: ChainDrafter | None = None
    fork_drafter: ForkDrafter = EagerForks(model)
    if method.device == "cuda":
        shapes = loop_shapes(
            max_sessions=max_sessions,
            max_draft_tokens=method.max_draft_tokens,
            max_branches=method.max_branches,
        )
        loops = capture_loops(model, shapes, max_sessions, say)
        if loops is not None:
            chain_drafter = fork_drafter = loops
    elif method.threads == 1:
        chain_drafter = LlamaChains.of(model)
    proposer = DraftModelProposer(
        model,
        name=method.model,
        limits=limits,
        chain_drafter=chain_drafter,
        fork_drafter=fork_drafter,
        # Masked drafts are made eagerly: on a GPU that costs more than the mask gains.
        masks=load_masks(folder, model.vocab_size, say) if method.device == "cpu" else None,
    )
    return proposer, hash_if_any(folder)
