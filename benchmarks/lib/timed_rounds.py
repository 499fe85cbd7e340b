"""Classes for vLLM's `custom_class` that time their rounds.

`--additional-config '{"outrider": FLAGS, "times": FILE}'`; `read_times` reads the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from outrider.vllm import adapter
from outrider.vllm.proposer import RemoteProposer

_WRITTEN_S = 0.25  # between writes
PARTS = ("between_s", "inputs_s", "device_s")
"""Of a step after a hit: from the choice of drafts to `execute_model` (which comes first with
`--async-scheduling`), until the model's launch, and the device's work on model and sampling. The
rest is that choice and the way of the results."""
_NAMES = ("steps", "rows", "propose_s", "waited_s", "hits", "hit_s", *PARTS)


class _Step:
    def __init__(self, event: Any) -> None:
        self.before = 0.0, 0.0
        self._marks = [event(enable_timing=True) for _ in range(2)] if event else []

    def mark(self, which: int) -> None:
        for mark in self._marks[which : which + 1]:
            mark.record()

    def device_s(self) -> float:
        return self._marks[0].elapsed_time(self._marks[1]) * 1e-3 if self._marks else 0.0


class _Times:
    """Sums over steps, and seconds from call to call where all rows had drafts at once."""

    def __init__(self, vllm_config: Any) -> None:
        self._file = Path(vllm_config.additional_config["times"])
        self.sums = dict.fromkeys(_NAMES, 0.0)
        self._written = 0.0
        self._last: tuple[float, int] | None = None  # a call's begin and rows, if all had drafts
        self._ended = self._began = 0.0  # the last call; the step that runs
        cuda: Any = torch.cuda
        # Of two steps in turn, the first two of `PARTS`, and begin and end on the device.
        self._steps = cycle([_Step(cuda.is_available() and cuda.Event) for _ in range(2)])
        self._running = self._sampled = next(self._steps)

    def watch(self, runner: Any) -> None:
        """Time the parts of a model runner's steps."""
        execute, forward, sample = runner.execute_model, runner._model_forward, runner._sample

        def begin(*args: Any, **kwargs: Any) -> Any:
            self._began = time.perf_counter()
            return execute(*args, **kwargs)

        def launch(*args: Any, **kwargs: Any) -> Any:
            now, prepared_at = time.perf_counter(), max(self._began, self._ended)
            self._running = next(self._steps)
            self._running.before = prepared_at - self._ended, now - prepared_at
            self._running.mark(0)
            return forward(*args, **kwargs)

        def end(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            self._sampled = self._running
            self._sampled.mark(1)
            return output

        runner.execute_model, runner._model_forward, runner._sample = begin, launch, end

    def add(self, began: float, waited_s: float, drafts: Sequence[object]) -> None:
        """Count a call of `propose` that ends now, and the step before it."""
        now, sums, rows = time.perf_counter(), self.sums, len(drafts)
        if self._last is not None and self._last[1] == rows:
            sums["hits"] += 1
            sums["hit_s"] += began - self._last[0]
            parts = *self._sampled.before, self._sampled.device_s()
            for name, seconds in zip(PARTS, parts, strict=True):
                sums[name] += seconds
        self._last = None if waited_s or not all(drafts) else (began, rows)
        self._ended = now
        added = (1, rows, now - began - waited_s, waited_s)
        for name, value in zip(_NAMES, added, strict=False):
            sums[name] += value
        if now - self._written > _WRITTEN_S:
            self._written, self._last = now, None
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(sums))
            part.rename(self._file)


def read_times(file: Path) -> dict[str, float]:
    """Return the sums so far; none before the first step."""
    with suppress(OSError):
        found: dict[str, float] = json.loads(file.read_text())
        return found
    return {}


class TimedProposer(RemoteProposer):
    """The plug-in's class; what it waits for drafts is no part of its own time."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._times = _Times(vllm_config)
        self._waited_s = self._began = 0.0

    def bind(self, runner: Any) -> None:
        """Time the runner's steps, and what the host waits."""
        new = self._host is None
        super().bind(runner)
        if new and self._host is not None:
            self._times.watch(runner)
            self._take, self._host.take = self._host.take, self._timed_take  # type: ignore[method-assign]

    def _timed_take(self, timeout_s: float = 0.0) -> Any:
        if timeout_s <= 0.0:
            return self._take()
        began = time.perf_counter()
        found = self._take(timeout_s)
        self._waited_s += time.perf_counter() - began
        return found

    def next_drafts(self, *args: Any) -> list[list[int]]:
        if self._host is None:  # another rank, which decides nothing
            return super().next_drafts(*args)
        began, self._waited_s = time.perf_counter(), 0.0
        drafts = super().next_drafts(*args)
        self._times.add(began, self._waited_s, drafts)
        return drafts

    def commit(self, output: Any) -> None:
        self._began = time.perf_counter()
        super().commit(output)

    def chosen(self, lengths: dict[str, int]) -> None:
        super().chosen(lengths)
        self._times.add(self._began, 0.0, [*lengths.values()])


class BareProposer:
    """Drafts each row's last token, of which next to nothing is accepted."""

    def __init__(self, vllm_config: Any) -> None:
        self._times = _Times(vllm_config)
        self._k = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        self._times.watch(adapter.find_runner(self))

    def propose(self, sampled_token_ids: Any, *_: Any, **__: Any) -> list[list[int]]:
        began = time.perf_counter()
        drafts = [list(tokens[-1:]) * self._k for tokens in sampled_token_ids]
        self._times.add(began, 0.0, drafts)
        return drafts
