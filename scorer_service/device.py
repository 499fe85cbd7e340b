"""Share out a CUDA device's memory at start-up, and capture its steps as graphs."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider import start_times
from outrider.engine.cuda.compile import compile_once
from outrider.engine.cuda.sampling import choose_and_verify, sample
from outrider.engine.cuda.trees import place_nodes, walk_nodes
from outrider.engine.graphs.capture import CudaGraphs, Work, replay_seconds
from outrider.engine.graphs.decode_buckets import Bucket, make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.prefill_graphs import PrefillGraphs
from outrider.engine.graphs.prefill_inputs import PrefillBucket, make_prefill_buckets
from outrider.engine.graphs.tree_inputs import TreeWork
from outrider.engine.model.memory_budget import (
    DeviceMemory,
    MemoryBudget,
    estimate_graphs,
    largest_of,
    measure_activations,
    samplings,
)
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.sampling.synthetic import forced_choices
from outrider.engine.sampling.verify import ChooseAndVerify
from outrider.errors import ConfigError

log = logging.getLogger(__name__)

_SECONDS_PER_LINE = 2.0  # of progress
_TREES = TreeWork(place_nodes, walk_nodes)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    trees: bool = False  # proposers may send draft trees
    synthetic_acceptance_rates: tuple[float, ...] = ()

    def buckets(self) -> list[Bucket]:
        """Return the captured sizes of decoding and of verification of up to K draft tokens."""
        verifying = self.num_speculative_tokens + 1
        trees = (verifying,) if self._captures_trees else ()
        return make_buckets(self.max_num_seqs, (1, verifying), trees)

    def verifier(self, device: torch.device) -> ChooseAndVerify:
        """Return what samples and verifies in captured steps."""
        if not self.synthetic_acceptance_rates:
            return choose_and_verify
        return forced_choices(choose_and_verify, self.synthetic_acceptance_rates, device)

    def prefill_buckets(self, model: PagedModel) -> list[PrefillBucket]:
        """Return those of steps with prompts, the largest last.

        Empty if the model does not run layer by layer.
        """
        if not model.layered:
            return []
        sizes = self.max_num_batched_tokens, self.max_num_seqs
        return make_prefill_buckets(*sizes, trees=self._captures_trees)

    @property
    def _captures_trees(self) -> bool:
        return self.trees and self.num_speculative_tokens > 1  # one token is a chain


def size_cache(
    memory: DeviceMemory, model: PagedModel, limits: StepLimits, say: Callable[[str], None]
) -> None:
    """Give the model's cache all memory that nothing else needs. Raises `ConfigError`.

    The model must have been loaded with `TRIAL_PAGES`.
    """
    activations = measure_activations(
        memory,
        model,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    used = [memory.used()]
    graphs = 0
    if model.capturable:
        buckets, prefill = limits.buckets(), limits.prefill_buckets(model)
        tried = prefill[-2:]
        verifier = limits.verifier(model.device)
        trial = _capture(model, buckets[-2:], tried, verifier, lambda: used.append(memory.used()))
        if trial is not None:
            graphs = estimate_graphs(used[len(tried) :], len(buckets))
            if tried:
                graphs += estimate_graphs(used[: len(tried) + 1], len(prefill))
        del trial
        gc.collect()
    page_bytes = model.kv_bytes_per_page
    budget = MemoryBudget(
        limit=memory.limit,
        weights=used[0] - (model.num_pages + 1) * page_bytes,
        activations=activations,
        graphs=graphs,
        page_bytes=page_bytes,
        page_size=model.page_size,
    )
    budget.check(model.max_model_len)
    for line in ("memory:", *budget.lines()):
        say(line)
    model.resize(budget.num_pages)


def compile_steps(model: PagedModel, limits: StepLimits, say: Callable[[str], None]) -> None:
    """Run a step of each kind, so that all kernels are compiled at once, before any capture."""
    if not (model.capturable and model.layered):  # modules may keep state while they run
        return
    say("compiling the kernels of all steps, some 8 s unless an earlier start did it")
    works: list[Work] = []

    def note(work: Work) -> Work:
        works.append(work)
        return work

    # All sizes have the same kernels.
    if largest := {bucket.trees: bucket for bucket in limits.prefill_buckets(model)}:
        PrefillGraphs(model, [*largest.values()], capture=note)
    verifier = limits.verifier(model.device)
    DecodeGraphs(
        model,
        limits.buckets(),
        capture=note,
        choose_and_verify=verifier,
        sample=sample,
        trees=_TREES,
    )
    eager = largest_of(model, limits.max_num_seqs, limits.max_num_batched_tokens)
    sizes = (model.vocab_size, model.dtype, model.kv_bytes_per_page, model.max_model_len)
    with start_times.phase("compiling"):
        # The sampler takes longest to compile, and in the other works it comes last.
        compile_once([*samplings(model, sample), *works, *eager], [limits, *sizes])


def capture_steps(
    model: PagedModel, limits: StepLimits, say: Callable[[str], None]
) -> DecodeGraphs | None:
    """Capture every bucket; None, with a line that says so, if the model's steps cannot be."""
    if not model.capturable:
        say("CUDA graphs cannot capture this attention: every step runs eagerly")
        return None
    began = said = time.perf_counter()
    buckets, prefill = limits.buckets(), limits.prefill_buckets(model)
    done, total = 0, len(buckets) + len(prefill)

    def on_captured() -> None:
        nonlocal done, said
        done += 1
        if time.perf_counter() - said > _SECONDS_PER_LINE:
            said = time.perf_counter()
            say(f"capturing steps {'#' * (20 * done // total):.<20} {done}/{total}")

    runner = _capture(model, buckets, prefill, limits.verifier(model.device), on_captured)
    if runner is not None:
        say(f"captured steps of {total} sizes in {time.perf_counter() - began:.1f} s")
    return runner


def _capture(
    model: PagedModel,
    buckets: Sequence[Bucket],
    prefill: Sequence[PrefillBucket],
    verifier: ChooseAndVerify,
    on_captured: Callable[[], None],
) -> DecodeGraphs | None:
    capture = CudaGraphs()
    try:
        forwards = None
        if prefill:
            forwards = PrefillGraphs(
                model, prefill, capture=capture, seconds=replay_seconds, on_captured=on_captured
            )
        return DecodeGraphs(
            model,
            buckets,
            capture=capture,
            choose_and_verify=verifier,
            sample=sample,
            trees=_TREES,
            forwards=forwards,
            on_captured=on_captured,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "Capturing the largest steps takes more memory than is left: lower --max-num-seqs, or "
            "--kv-cache-memory if it is given."
        ) from error
    except RuntimeError as error:
        # Modules of `transformers` may do what cannot be captured, such as ask for a number.
        log.warning("CUDA graphs cannot capture this model, so its steps run eagerly: %s", error)
        return None
