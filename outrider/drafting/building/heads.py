"""Build the methods that read the target's hidden states."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from outrider.drafting.building.config import HeadConfig, Say
from outrider.drafting.building.loops import (
    block_shapes,
    loop_capture,
    one_shot_shapes,
    recurrent_shapes,
)
from outrider.drafting.building.weights import PAGE_SIZE, choose_dtype, load_masks, prepare_device
from outrider.drafting.graphs.loops import LoopCapture
from outrider.drafting.hidden_states.block_drafter import BlockDrafter
from outrider.drafting.hidden_states.cached_drafter import CachedDrafter
from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.heads.base import HeadSetup, OneShotHead, Place, RecurrentHead
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.heads.dflash import DFlashHead
from outrider.drafting.hidden_states.heads.dspark import DSparkHead
from outrider.drafting.hidden_states.heads.eagle import EagleHead
from outrider.drafting.hidden_states.heads.eagle3 import Eagle3Head
from outrider.drafting.hidden_states.heads.medusa import read_medusa
from outrider.drafting.hidden_states.heads.mlp_speculator import read_mlp_speculator
from outrider.drafting.hidden_states.heads.mtp_loader import read_mtp
from outrider.drafting.hidden_states.heads.peagle import read_peagle
from outrider.drafting.hidden_states.one_shot import OneShotProposer
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.hidden_states.trees import max_trees
from outrider.drafting.proposer import FeatureProposer, ProposerLimits
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.kv_cache.memory import fitting
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend, is_capturable
from outrider.engine.model.loader import choose_llama_ops, count_pages
from outrider.errors import ConfigError
from outrider.models.modules import resolve_module
from outrider.models.tokenizer import hash_if_any

_ONE_SHOT: Mapping[str, Callable[[Path, HeadSetup], OneShotHead]] = {
    "medusa": read_medusa,
    "mlp_speculator": read_mlp_speculator,
}
_CACHED: Mapping[str, Callable[[Path, HeadSetup], RecurrentHead | BlockHead]] = {
    "dflash": DFlashHead.read,
    "dspark": DSparkHead.read,
    "peagle": read_peagle,
    "mtp": read_mtp,
    "eagle": EagleHead.read,
    "eagle3": Eagle3Head.read,
}


def build_head(
    method: HeadConfig, max_sessions: int, prefill_budget: int, say: Say
) -> tuple[FeatureProposer, str]:
    """Return the method, not warmed up, and its target's tokenizer hash (empty if none).

    Raises `ConfigError`.
    """
    began = time.perf_counter()
    prepare_device(method)
    folder, target = resolve_module(method.model, method.name, method.target_model)
    say(f"loading the {method.name} module {folder} for {target}")
    with fitting("The module", method.kv_cache_memory):
        limits = ProposerLimits(
            max_sessions=max_sessions,
            max_draft_tokens=method.max_draft_tokens,
            max_model_len=method.max_model_len,
            prefill_budget=prefill_budget,
            tree_width=method.tree_width,
        )
        proposer = _build(method, folder, target, limits, say)
    say(f"loaded after {time.perf_counter() - began:.1f} s")
    return proposer, hash_if_any(target)


def _build(
    method: HeadConfig, folder: Path, target: Path, limits: ProposerLimits, say: Say
) -> FeatureProposer:
    fast = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    dtype = choose_dtype(method, on_cpu=fast)
    device = torch.device(method.device)
    if method.quantization == "int8" and method.device == "cpu":
        # Imported here: on a GPU nothing needs Numba.
        from outrider.engine.cpu import int8

        if not int8.available():
            raise ConfigError("--quantization int8: this CPU has no AVX-512 VNNI. Leave it out.")
    ops = choose_llama_ops(device, dtype, int8_weights=method.int8_weights)
    place = Place(dtype, device, ops)
    setup = HeadSetup(target, place, method.max_model_len, method.projects_features)
    if method.name in _ONE_SHOT:
        head = _ONE_SHOT[method.name](folder, setup)
        ops.tune(head.uses)
        with _one_shot_capture(head, limits, say) as capture:
            return OneShotProposer(
                head,
                method=method.name,
                name=method.model,
                limits=limits,
                masks=load_masks(target, head.vocab_size, say),
                capture=capture,
            )
    module = _CACHED[method.name](folder, setup)
    ops.tune(module.uses)
    per_page = PAGE_SIZE * dtype.itemsize
    per_page *= sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in module.kv_layers)
    num_pages = count_pages(method.kv_cache_memory, per_page)
    backend = choose_backend(method.attention_backend, module.attention_traits(), device)
    drafter: CachedDrafter
    with _cached_capture(module, backend, limits, say) as capture:
        pools = KVPools(num_pages + (capture is not None), PAGE_SIZE, dtype, device)
        if isinstance(module, BlockHead):
            drafter = BlockDrafter(module, pools, backend, limits, capture)
        else:
            drafter = RecurrentDrafter(module, pools, backend, limits, capture)
    masks = load_masks(target, module.vocab_size, say)
    return CachedHeadProposer(drafter, method=method.name, name=method.model, masks=masks)


def _one_shot_capture(
    head: OneShotHead, limits: ProposerLimits, say: Say
) -> AbstractContextManager[LoopCapture | None]:
    if head.device.type != "cuda":
        return nullcontext()
    max_rows = min(limits.max_sessions, max_trees(limits.tree_width, head.vocab_size))
    shapes = one_shot_shapes(max_rows=max_rows, max_depth=head.max_depth)
    return loop_capture(shapes, head.device, say, (type(head), head.vocab_size, head.features))


def _cached_capture(
    head: RecurrentHead | BlockHead, backend: AttentionBackend, limits: ProposerLimits, say: Say
) -> AbstractContextManager[LoopCapture | None]:
    if head.device.type != "cuda":
        return nullcontext()
    if not (head.capturable and is_capturable(backend)):
        say("CUDA graphs cannot capture this module or its attention: drafts run eagerly")
        return nullcontext()
    width, max_rows = limits.tree_width, limits.max_sessions
    if isinstance(head, BlockHead):
        shapes = block_shapes(
            max_rows=min(max_rows, head.max_rows(limits.max_draft_tokens, width)),
            limits=(limits.max_draft_tokens, head.max_depth),
            width=width,
            num_slots=head.num_slots,
        )
    else:
        if width > 1:
            max_rows = min(max_rows, max_trees(width, head.vocab_size))
        shapes = recurrent_shapes(
            max_rows=max_rows, max_draft_tokens=limits.max_draft_tokens, width=width
        )
    # What tells modules with other kernels apart.
    sizes = (type(head), head.vocab_size, head.dtype, *head.kv_layers, head.features)
    return loop_capture(shapes, head.device, say, sizes)
