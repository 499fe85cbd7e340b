"""vLLM's scheduler of steps ahead, without room for drafts in rows that have none.

Importing this module imports vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from outrider.vllm.adapter import undrafted_in


class DraftRoomScheduler(AsyncScheduler):  # type: ignore[misc]
    """Schedules no draft tokens for requests that the worker says are undrafted.

    vLLM gives each row of each step room for `num_speculative_tokens`, used or not.
    """

    _undrafted: frozenset[str] = frozenset()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next step."""
        if self._undrafted:
            for request in self.running:
                if request.request_id in self._undrafted:
                    request.spec_token_ids = []
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in the output of a step."""
        self._undrafted = undrafted_in(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)
