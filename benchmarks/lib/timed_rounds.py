"""Classes for vLLM's `custom_class` that time their rounds.

`--additional-config '{"outrider": FLAGS, "times": FILE}'`; `read_times` reads the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.vllm.proposer import RemoteProposer

_WRITTEN_S = 0.25  # between writes
_NAMES = ("steps", "rows", "propose_s", "waited_s", "hits", "hit_s")


class _Times:
    """Sums over steps, and seconds from call to call where all rows had drafts at once."""

    def __init__(self, vllm_config: Any) -> None:
        self._file = Path(vllm_config.additional_config["times"])
        self.sums = dict.fromkeys(_NAMES, 0.0)
        self._written = 0.0
        self._last: tuple[float, int] | None = None  # a call's begin and rows, if all had drafts

    def add(self, began: float, waited_s: float, drafts: Sequence[object]) -> None:
        """Count a call of `propose` that ends now, and the step before it."""
        now, sums, rows = time.perf_counter(), self.sums, len(drafts)
        if self._last is not None and self._last[1] == rows:
            sums["hits"] += 1
            sums["hit_s"] += began - self._last[0]
        self._last = None if waited_s or not all(drafts) else (began, rows)
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
        """Time what the host waits."""
        new = self._host is None
        super().bind(runner)
        if new and self._host is not None:
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

    def load_model(self, *_: Any, **__: Any) -> None: ...

    def propose(self, sampled_token_ids: Any, *_: Any, **__: Any) -> list[list[int]]:
        began = time.perf_counter()
        drafts = [list(tokens[-1:]) * self._k for tokens in sampled_token_ids]
        self._times.add(began, 0.0, drafts)
        return drafts
