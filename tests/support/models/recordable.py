"""Models whose loops can be "captured" on a CPU, where a capture runs its work again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafting.drafters import AsyncLoop, DraftInput, StatesBehind
from outrider.drafting.graphs import loops
from outrider.drafting.hidden_states.cached_drafter import CachedDrafter
from outrider.drafting.hidden_states.trees import Guess
from outrider.engine.attention.base import AttentionParams
from outrider.engine.batch import PackedBatch, RowSlice
from outrider.engine.graphs.capture import Work
from outrider.engine.kv_cache.pools import LayerPool
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.transfers import select_rows
from outrider.params import SamplingParams
from tests.support.models.hash_model import HashModel, context_hash


def rerun(work: Work) -> Work:
    """A `Capture` for a device that runs each operation at once; runs the work once, as CUDA."""
    work()
    return work


def run_each(works: Sequence[Work]) -> None:
    """A `Precompile` for the same."""
    for work in works:
        work()


class Counted:
    """`rerun`, which counts the repetitions of work."""

    def __init__(self) -> None:
        self.repeated = 0

    def __call__(self, work: Work) -> Work:
        again = rerun(work)

        def counted() -> None:
            self.repeated += 1
            again()

        return counted


class RecordableHashModel(HashModel):
    """Rows may be filled up by padding tokens on the scratch page.

    What they leave there is no token: a row that reads it gets logits of its own, wrong ones.
    """

    def __init__(self, page_size: int = 4, num_pages: int = 64, max_model_len: int = 128) -> None:
        super().__init__(64, page_size, num_pages + 1, max_model_len)
        self.num_pages = num_pages
        self.scratch_page = num_pages

    def logits(self, batch: PackedBatch) -> Tensor:
        slots = batch.slot_mapping.numpy()
        real = slots // self.page_size != self.scratch_page
        assert len(np.unique(slots[real])) == real.sum(), "two tokens in one slot"
        self._slots[slots] = np.where(real, batch.input_ids.numpy(), -7)
        self._positions[slots] = np.where(real, batch.positions.numpy(), -7)
        rows = torch.searchsorted(batch.cu_seqlens_q[1:].long(), batch.logits_index, right=True)
        states = []
        for row, index in zip(rows.tolist(), batch.logits_index.tolist(), strict=True):
            last = int(batch.positions[index]) // self.page_size
            pages = batch.block_table[row, : last + 1]
            lost = bool((pages == self.scratch_page).any())
            states.append(13 if lost else context_hash(self._context(batch, row, index)))
        return torch.from_numpy(self._logits(np.array(states, np.uint64)))


def disturbed(model: LlamaForCausalLM, noise: float) -> LlamaForCausalLM:
    """The model with noise on its weights, in parts of their mean size."""
    for weight in model.parameters() if noise else ():
        weight.data += noise * weight.data.abs().mean() * torch.randn_like(weight)
    return model


def tiny_llama_config(max_position_embeddings: int = 128, vocab_size: int = 97) -> LlamaConfig:
    """Return the config of a Llama of two layers."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
    )


def recordable_llama(page_size: int = 4, num_pages: int = 64, noise: float = 0.0) -> PagedModel:
    """A tiny one in float64, so that near ties are decided alike; `disturbed` by `noise`."""
    torch.manual_seed(0)
    return build_paged_model(
        disturbed(LlamaForCausalLM(tiny_llama_config()).double(), noise),
        ModelOptions(page_size=page_size, num_pages=num_pages, self_test=False),
    )


class NoHostTensors(TorchFunctionMode):
    """Refuses what a CUDA graph cannot hold and meta tensors let pass: tensors of the host's."""

    _REFUSED = frozenset({torch.tensor, torch.as_tensor, torch.from_numpy})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func not in self._REFUSED, "made on the host"
        return func(*args, **(kwargs or {}))


def rerun_strictly(work: Work) -> Work:
    """`rerun` on the device "meta", where whatever looks at numbers raises, as under capture."""

    def again() -> None:
        with NoHostTensors():
            work()

    return rerun(again)


def launch_without_waiting(
    drafter: CachedDrafter, monkeypatch: pytest.MonkeyPatch
) -> AsyncLoop[Guess] | None:
    """Launch two drafts of three tokens behind a step on the device "meta".

    Whatever looks at the step's output raises.
    """
    device, width = drafter.head.device, drafter.head.features.width
    verify_output = torch.empty(3, 1 + 3, dtype=torch.int32, device=device)
    rows = [
        DraftInput(
            RowSlice((0,) * count, 5, [1, 2, 3, 4], 1),
            3,
            SamplingParams(temperature=1.0, seed=count),
        )
        for count in (3, 2)
    ]
    states = StatesBehind(torch.empty(7, width, dtype=torch.bfloat16, device=device), (4, 0))
    monkeypatch.setattr(loops, "begin_fetch", lambda _: None)  # the copy that nobody waits for yet
    return drafter.launch_after_verify(rows, select_rows(verify_output, [2, 0]), states)


class MetaAttention:
    """A recordable `StepAttention` on the device "meta"."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:  # noqa: ARG002
        return query.new_empty(*query.shape[:3], pool.shape[2])
