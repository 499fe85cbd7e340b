"""A step runner with a given mean acceptance length, whatever was drafted.

Random weights have no acceptance of their own. A seeded hash decides for each drafted position
whether it is accepted, as vLLM's `rejection_sample_method: "synthetic"` does. The text means
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.engine.runner import Pending, StepRunner
from outrider.engine.step import ScheduledRow, Step, StepResult
from outrider.params import TokenIds

_MASK = 2**64 - 1


class SyntheticRunner:
    """A `StepRunner` that runs another's steps and reports synthetic acceptance.

    `mean_length` is 1 + accepted tokens per round of a full draft of `num_draft_tokens`, so from
    1 to num_draft_tokens + 1; shorter drafts get the same chance per token. Raises `ValueError`.
    """

    def __init__(
        self, inner: StepRunner, mean_length: float, num_draft_tokens: int, seed: int = 0
    ) -> None:
        self._inner = inner
        self._chance = chance_per_token(mean_length, num_draft_tokens)
        self._seed = seed

    def takes_device_drafts(self, num_rows: int, num_drafted: int) -> bool:  # noqa: ARG002
        return False

    def launch(self, step: Step) -> Pending:
        return _Synthetic(self._inner.launch(step), step, self._accepted)

    def _accepted(self, row: ScheduledRow) -> int:
        first = row.slice.start + len(row.slice.token_ids) - len(row.draft)
        for i in range(len(row.draft)):
            if _uniform(self._seed, row.seq.session_id, first + i) >= self._chance:
                return i
        return len(row.draft)


@dataclass(frozen=True, slots=True)
class _Synthetic:
    pending: Pending
    step: Step
    accepted: Callable[[ScheduledRow], int]

    verified = None  # the device has the true result

    def wait(self) -> StepResult:
        # This is done while the step runs, because it is no part of a real step.
        accepted = tuple(self.accepted(row) for row in self.step.rows)
        result = self.pending.wait()
        choices = [
            _as_if(row.draft, n, chosen)
            for row, n, chosen in zip(self.step.rows, accepted, result.choices, strict=True)
        ]
        return replace(result, choices=choices, accepted=accepted)


def _as_if(draft: TokenIds, accepted: int, chosen: Sequence[int]) -> tuple[int, ...]:
    """Return the choices of a target that accepts so much of a draft.

    The next choice differs from the draft.
    """
    choices = [*draft[:accepted], *chosen[accepted:]]
    if accepted < len(draft) and choices[accepted] == draft[accepted]:
        choices[accepted] = draft[accepted] - 1 if draft[accepted] else 1
    return tuple(choices)


def _uniform(seed: int, session_id: int, position: int) -> float:
    """Return a number of [0, 1), by splitmix64."""
    x = (seed * 0x9E3779B97F4A7C15 + session_id * 0xD1B54A32D192ED03 + position) & _MASK
    x = (x * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) / 2**64


def chance_per_token(mean_length: float, num_draft_tokens: int) -> float:
    """Return the a for which 1 + a + a^2 + ... + a^num_draft_tokens is `mean_length`.

    Raises `ValueError`.
    """
    if not 1 <= mean_length <= num_draft_tokens + 1:
        raise ValueError(
            f"A mean acceptance length of {mean_length:g} is out of reach with "
            f"{num_draft_tokens} draft tokens: 1 to {num_draft_tokens + 1}."
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(num_draft_tokens + 1)) < mean_length:
            low = middle
        else:
            high = middle
    return high
