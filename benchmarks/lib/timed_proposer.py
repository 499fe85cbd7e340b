"""The plug-in's class for vLLM with a clock around what a step waits for.

It adds what `propose` took to a file, which `read_times` reads.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.vllm.proposer import RemoteProposer

_WRITTEN_S = 0.25  # between writes
_NAMES = ("steps", "rows", "propose_s", "propose_cpu_s", "waited_s", "whole_s", "longest_s")


class TimedProposer(RemoteProposer):
    """Times `propose`: all of it, what it waits for drafts, and its CPU time without the wait.

    `--additional-config '{"outrider": FLAGS, "times": FILE}'`.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._file = Path(vllm_config.additional_config["times"])
        self._sums = dict.fromkeys(_NAMES, 0.0)
        self._written = 0.0

    def bind(self, runner: Any) -> None:
        """Time the host's wait as well."""
        super().bind(runner)
        host = self._host
        if host is None or hasattr(host, "timed"):
            return
        host.timed = True  # type: ignore[attr-defined]
        take = host.take

        def timed(timeout_s: float = 0.0) -> Any:
            if timeout_s <= 0.0:
                return take()
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return take(timeout_s)
            finally:
                self._sums["waited_s"] += time.perf_counter() - began
                self._sums["propose_cpu_s"] -= time.thread_time() - cpu

        host.take = timed  # type: ignore[method-assign]

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """See `RemoteProposer.propose`."""
        sums, began, cpu = self._sums, time.perf_counter(), time.thread_time()
        waited = sums["waited_s"]
        drafts = super().propose(*args, **kwargs)
        now = time.perf_counter()
        took = now - began - (sums["waited_s"] - waited)
        sums["propose_cpu_s"] += time.thread_time() - cpu
        sums["propose_s"] += took
        sums["longest_s"] = max(sums["longest_s"], took)
        sums["whole_s"] += now - began
        sums["steps"] += 1
        sums["rows"] += len(drafts)
        if now - self._written > _WRITTEN_S:
            self._written = now
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(sums))
            part.rename(self._file)
        return drafts


def read_times(file: Path) -> dict[str, float]:
    """Return the sums so far; none before the first step."""
    with suppress(OSError):
        found: dict[str, float] = json.loads(file.read_text())
        return found
    return {}
