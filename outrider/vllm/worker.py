"""vLLM's worker classes with what `outrider scorer --engine vllm` asks of them.

`vllm serve` needs none of them: `RemoteProposer` finds its model runner by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider.vllm import adapter
from outrider.vllm.proposer import RemoteProposer


class _Hosting:
    """A worker that hosts the draft side, if vLLM speculates by it."""

    model_runner: Any

    @property
    def _proposer(self) -> RemoteProposer | None:
        drafter = getattr(self.model_runner, "drafter", None)
        return drafter if isinstance(drafter, RemoteProposer) else None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and hand the runner to the proposer if it did not find it."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        adapter.keep_cpu_generators(self.model_runner)
        if self._proposer is not None:
            self._proposer.bind(self.model_runner)

    def shutdown(self) -> None:
        """Say goodbye to proposers first."""
        if self._proposer is not None:
            self._proposer.stop()
        super().shutdown()  # type: ignore[misc]

    def outrider_info(self) -> dict[str, str]:
        """Return the draft side's addresses and the verification rule; empty on other ranks."""
        return {} if self._proposer is None else self._proposer.info

    def outrider_stats(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return `RequestStats` as dicts by vLLM's request id: of those that ended, once."""
        proposer = self._proposer
        found = {} if proposer is None else {name: proposer.take_stats(name) for name in names}
        return {name: asdict(stats) for name, stats in found.items() if stats is not None}


def __getattr__(name: str) -> Any:
    """Build `GPUWorker` or `CPUWorker` when it is asked for, over vLLM's class for the device."""
    devices = {"GPUWorker": "cuda", "CPUWorker": "cpu"}
    if name not in devices:
        raise AttributeError(name)
    made = type(name, (_Hosting, adapter.worker_class(devices[name])), {"__module__": __name__})
    globals()[name] = made
    return made
