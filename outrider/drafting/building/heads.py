"""Builds the methods that read the target's hidden states."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from outrider.drafting.building.config import HeadConfig, Say
from outrider.drafting.building.loops import one_shot_shapes, recording, recurrent_shapes
from outrider.drafting.building.weights import (
    PAGE_SIZE,
    choose_dtype,
    load_masks,
    prepare_device,
)
from outrider.drafting.draft_model.masks import DraftMasks
from outrider.drafting.graphs.loop_inputs import LoopShape
from outrider.drafting.graphs.loops import Capture
from outrider.drafting.hidden_states.heads.base import OneShotHead, RecurrentHead
from outrider.drafting.hidden_states.heads.eagle import load_eagle
from outrider.drafting.hidden_states.heads.eagle3 import load_eagle3
from outrider.drafting.hidden_states.heads.medusa import load_medusa
from outrider.drafting.hidden_states.heads.mlp_speculator import load_mlp_speculator
from outrider.drafting.hidden_states.heads.mtp_loader import load_mtp
from outrider.drafting.hidden_states.one_shot import MAX_MODEL_LEN, OneShotProposer
from outrider.drafting.hidden_states.recurrent import RecurrentProposer
from outrider.drafting.hidden_states.trees import max_trees
from outrider.drafting.proposer import FeatureProposer
from outrider.engine.kv_cache.memory import fitting
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend, is_capturable
from outrider.engine.model.loader import choose_llama_ops, count_pages
from outrider.models.modules import resolve_module
from outrider.models.tokenizer import hash_if_any

_ONE_SHOT: Mapping[str, Callable[[Path, Path, torch.dtype, torch.device], OneShotHead]] = {
    "medusa": load_medusa,
    "mlp_speculator": load_mlp_speculator,
}


def build_head(
    method: HeadConfig, max_sessions: int, prefill_budget: int, say: Say
) -> tuple[FeatureProposer, str]:
    """Return the method, not warmed up, and its target's tokenizer hash (empty if it has none).

    Raises `ConfigError`.
    """
    began = time.perf_counter()
    prepare_device(method)
    folder, target = resolve_module(method.model, method.name, method.target_model)
    say(f"loading the {method.name} module {folder} for {target}")
    # On CPUs with AVX-512 compiled products read half as much in bfloat16.
    fast = torch.bfloat16 if torch.cpu._is_avx512_supported() else torch.float32
    dtype = choose_dtype(method, on_cpu=fast)
    proposer: FeatureProposer
    with fitting("The module", method.kv_cache_memory):
        if method.name in _ONE_SHOT:
            proposer = _one_shot(method, folder, target, dtype, max_sessions, say)
        else:
            head = _load_recurrent(method, folder, target, dtype)
            masks = load_masks(target, head.vocab_size, say)
            proposer = _recurrent(method, head, max_sessions, prefill_budget, masks, say)
    say(f"loaded after {time.perf_counter() - began:.1f} s")
    return proposer, hash_if_any(target)


def _one_shot(
    method: HeadConfig,
    folder: Path,
    target: Path,
    dtype: torch.dtype,
    max_sessions: int,
    say: Say,
) -> OneShotProposer:
    device = torch.device(method.device)
    head = _ONE_SHOT[method.name](folder, target, dtype, device)
    choose_llama_ops(device, dtype, int8_weights=method.int8_weights).tune(head.uses)
    max_rows = min(max_sessions, max_trees(method.tree_width, head.vocab_size))
    shapes = one_shot_shapes(max_rows=max_rows, max_depth=head.max_depth)
    with _captured(method, shapes, say) as capture:
        return OneShotProposer(
            head,
            method=method.name,
            name=method.model,
            max_sessions=max_sessions,
            max_draft_tokens=method.max_draft_tokens,
            max_model_len=method.max_model_len or MAX_MODEL_LEN,
            tree_width=method.tree_width,
            masks=load_masks(target, head.vocab_size, say),
            recording=capture,
        )


def _load_recurrent(
    method: HeadConfig, folder: Path, target: Path, dtype: torch.dtype
) -> RecurrentHead:
    device, longest = torch.device(method.device), method.max_model_len
    head: RecurrentHead
    if method.name == "mtp":
        head = load_mtp(folder, target, dtype, device, max_model_len=longest)
    elif method.name == "eagle":
        head = load_eagle(folder, target, dtype, device, max_model_len=longest)
    else:
        project = method.projects_features
        head = load_eagle3(folder, target, dtype, device, max_model_len=longest, project=project)
    choose_llama_ops(device, dtype, int8_weights=method.int8_weights).tune(head.uses)
    return head


def _recurrent(
    method: HeadConfig,
    head: RecurrentHead,
    max_sessions: int,
    prefill_budget: int,
    masks: DraftMasks | None,
    say: Say,
) -> RecurrentProposer:
    per_page = PAGE_SIZE * head.dtype.itemsize
    per_page *= sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in head.kv_layers)
    num_pages = count_pages(method.kv_cache_memory, per_page)
    traits = head.attention_traits()
    backend = choose_backend(method.attention_backend, traits, head.device)
    width, shapes = method.tree_width, []
    if head.capturable and is_capturable(backend):
        at_once = max_sessions if width == 1 else max_trees(width, head.vocab_size)
        shapes = recurrent_shapes(
            max_rows=min(max_sessions, at_once),
            max_draft_tokens=method.max_draft_tokens,
            width=width,
        )
    elif method.device == "cuda":
        say("this module or its attention cannot be captured: drafts are eager")
    with _captured(method, shapes, say) as capture:
        return RecurrentProposer(
            head,
            KVPools(num_pages + (capture is not None), PAGE_SIZE, head.dtype, head.device),
            backend,
            method=method.name,
            name=method.model,
            max_sessions=max_sessions,
            max_draft_tokens=method.max_draft_tokens,
            max_model_len=method.max_model_len,
            prefill_budget=prefill_budget,
            tree_width=width,
            masks=masks,
            recording=capture,
        )


def _captured(
    method: HeadConfig, shapes: Sequence[LoopShape], say: Say
) -> AbstractContextManager[Capture | None]:
    """Yield the capture of loops of these shapes, on CUDA only."""
    if method.device != "cuda" or not shapes:
        return nullcontext()
    return recording(shapes, torch.device(method.device), say)
