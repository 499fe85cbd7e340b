"""A scorer whose device is simulated: it takes a fixed time for each step and computes no model.

    python -m benchmarks.lib.streaming_scorer --step-ms 50 [flags of the scorer]

All else is the scorer's own process: its servers, hub, engine and the staging of captured steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor

from outrider.engine.batch import PackedBatch
from outrider.engine.graphs.decode_buckets import make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.runner import Pending
from outrider.engine.sampling.sample import SamplingBatch
from outrider.engine.sampling.verify import VerifyBatch, verify_rows
from outrider.engine.step import RowSlots, Step, StepResult
from outrider.models.tokenizer import Tokenizer
from scorer_service import core
from scorer_service.__main__ import main as serve
from scorer_service.config import ScorerOptions

_MAX_LEN: Final = 8192
_TOKENS_A_ROW: Final = 2048  # of the cache, in the mean
_FIRST: Final = 1024  # id of the first token of a text, of
_CYCLE: Final = 64
_ODD: Final = 11  # positions from one break of the cycle to the next

Loaded = tuple["CycleModel", "PacedRunner", list[tuple[int, int, float]]]


def next_tokens(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the tokens after `tokens` [n] at `positions` [n], alike on every such scorer.

    They go round a cycle, so that copying proposers are right, and leave it now and then.
    """
    return _FIRST + (tokens * 5 + 3 + (positions % _ODD == 0)) % _CYCLE


class CycleModel:
    """Implements `CapturableModel` without weights and without a cache."""

    device, dtype = torch.device("cpu"), torch.float32
    max_model_len = _MAX_LEN
    eos_token_ids: frozenset[int] = frozenset()
    kv_bytes_per_page = 0
    pools = SimpleNamespace(features=None)

    def __init__(self, vocab_size: int, page_size: int, num_pages: int) -> None:
        self.vocab_size, self.page_size = vocab_size, page_size
        self.num_pages = self.scratch_page = num_pages

    def forward(self, batch: PackedBatch) -> Tensor:
        """See `Model.forward`."""
        following = next_tokens(batch.input_ids, batch.positions)[batch.logits_index]
        logits = torch.zeros(len(following), self.vocab_size)
        return logits.scatter_(1, following[:, None], 1.0)

    def logits(self, batch: PackedBatch, out: Tensor | None = None) -> Tensor:
        """Leave `out` as it is: `verify` reads none."""
        return self.forward(batch) if out is None else out

    def move_slots(self, source: Tensor, target: Tensor) -> None: ...


def sample(logits: Tensor, _batch: SamplingBatch) -> Tensor:
    """Implement `Sample` without noise, after prompts."""
    return logits.argmax(dim=1)


def verify(_logits: Tensor, batch: VerifyBatch, out: Tensor) -> None:
    """Implement `ChooseAndVerify` for a `CycleModel`."""
    width = out.shape[1] - 1
    following = next_tokens(batch.input_ids, batch.sampling.position)
    if width == 1:
        out[:, 0], out[:, 1] = 0, following
        return
    choices = batch.by_row(following, width)
    agreeing = verify_rows(batch.by_row(batch.input_ids, width)[:, 1:], choices)
    torch.minimum(agreeing, batch.draft_lens, out=out[:, 0])
    out[:, 1:] = choices


class PacedRunner:
    """Runs captured steps at once, and hands over their results as a device of its own would.

    A device that takes `step_s` seconds for a step begins with it once it has ended the one before.
    """

    def __init__(self, graphs: DecodeGraphs, step_s: float) -> None:
        self._graphs, self._step_s = graphs, step_s
        self._free_at = 0.0

    def launch(self, step: Step) -> Pending:
        """See `StepRunner.launch`."""
        pending = self._graphs.launch(step)
        self._free_at = max(time.perf_counter(), self._free_at) + self._step_s
        return _Paced(pending, self._free_at, self._step_s)


@dataclass(frozen=True, slots=True)
class _Paced:
    pending: Pending
    ends_at: float
    step_s: float

    @property
    def verified(self) -> Tensor | None:
        return self.pending.verified

    @property
    def slots(self) -> RowSlots | None:
        return self.pending.slots

    def wait(self) -> StepResult:
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return replace(self.pending.wait(), forward_s=self.step_s, verify_s=0.0)


def load(
    step_s: float,
    folder: Path,
    options: ScorerOptions,
    build_first: Callable[[], None] = lambda: None,
) -> Loaded:
    """Do what `scorer_service.loading.load` does, for a simulated device."""
    build_first()
    rows = options.max_num_seqs
    vocab_size = Tokenizer.load(folder).needed_vocab_size
    num_pages = rows * _TOKENS_A_ROW // options.page_size + _MAX_LEN // options.page_size
    model = CycleModel(vocab_size, options.page_size, num_pages)
    buckets = make_buckets(rows, sorted({1, 1 + options.num_speculative_tokens}))
    graphs = DecodeGraphs(
        model, buckets, capture=lambda work: work, choose_and_verify=verify, sample=sample
    )
    times = [(bucket.rows, bucket.tokens, step_s) for bucket in buckets]
    return model, PacedRunner(graphs, step_s), times


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step")
    args, flags = parser.parse_known_args(argv)
    torch.set_num_threads(1)
    core.load = partial(load, args.step_ms / 1e3)  # type: ignore[attr-defined, assignment]
    return serve(["--exit-with-parent", "--scorer-id", "streaming", *flags])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
