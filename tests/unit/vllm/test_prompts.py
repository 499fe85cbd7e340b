"""Steps with prompts, as the policy learns of them."""

from __future__ import annotations

import pytest

from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.base import StepDone
from outrider.types import Request
from outrider.vllm.draft_host import DraftHost
from outrider.vllm.waiting import LockstepPolicy

STEP_S, PROMPT_S, NOTED_S = 0.01, 0.03, 0.002


class Prompts:
    """A host whose steps take time by what they run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.done = 1.0, list[StepDone]()
        policy = LockstepPolicy(4)
        self.observed: list[tuple[int, int, float]] = []
        observe = policy.measured.steps.observe_step

        def observing(num_rows: int, num_tokens: int, seconds: float) -> None:
            self.observed.append((num_rows, num_tokens, seconds))
            observe(num_rows, num_tokens, seconds)

        monkeypatch.setattr(policy.measured.steps, "observe_step", observing)
        self.host = DraftHost(4, 64, 8, policy=policy, clock=lambda: self.now)
        monkeypatch.setattr(
            self.host.tracker, "step_done", lambda _, step, **__: self.done.append(step)
        )
        self.texts: dict[str, list[int]] = {}

    def step(self, requests: dict[str, int], seconds: float, *opened: str) -> None:
        """Run a step of tokens by request; below 0: within the prompt, so nothing is emitted."""
        scheduled = {name: abs(tokens) for name, tokens in requests.items()}
        began = self.now
        self.now += NOTED_S  # a step is noted while it runs
        self.host.begin_step([], scheduled, {}, began)
        for name in opened:
            prompt = (5,) * 8
            request = Request(
                self.host.next_session_id(),
                prompt,
                SamplingParams(temperature=0.0),
                StopParams(max_tokens=32),
                SpeculationParams(),
            )
            self.host.open(name, request, frozenset())
            self.texts[name] = list(prompt)
        self.host.account()
        self.now = began + seconds
        emitted = [[7] if tokens > 0 else [] for tokens in requests.values()]
        for name, tokens in zip(requests, emitted, strict=True):
            self.texts[name] += tokens
        names, lengths = list(requests), [len(self.texts[name]) for name in requests]
        self.host.commit(names, emitted, lengths, lambda row, n: self.texts[names[row]][:n])
        self.host.choose_drafts(names)


def test_policy_learns_of_a_step_without_its_prompts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Prompts(monkeypatch)
    run.step({"a": 8}, PROMPT_S, "a")
    run.step({"a": 1}, STEP_S)
    run.step({"a": 1}, STEP_S)
    run.step({"a": 1, "b": -4}, STEP_S + PROMPT_S, "b")  # half of a prompt
    run.step({"a": 1, "b": 4}, STEP_S + PROMPT_S)  # the rest of it, and its first token
    run.step({"a": 1, "b": 1}, STEP_S)
    run.step({"a": 1, "b": -9}, STEP_S + PROMPT_S)  # "b" lost its pages
    run.step({"a": 1, "b": 2}, STEP_S + PROMPT_S)
    run.step({"a": 1, "b": 1}, STEP_S)
    run.host.account()
    assert [done.comparable for done in run.done] == [False, *(True,) * 8]
    assert [done.num_rows for done in run.done] == [1, 1, 1, 2, 2, 2, 2, 2, 2]
    prompts = [0.0, 0.0, PROMPT_S, PROMPT_S, 0.0, PROMPT_S, PROMPT_S, 0.0]
    assert [done.prompt_s for done in run.done[1:]] == pytest.approx(prompts, abs=1e-4)
    assert [done.tokens for done in run.done] == [1, 1, 1, 1, 2, 2, 1, 2, 2]
    sizes = [(1, 1), (1, 1), (2, 2), (2, 2)]
    assert [(rows, tokens) for rows, tokens, _ in run.observed] == sizes
    assert [seconds for *_, seconds in run.observed] == pytest.approx([STEP_S] * 4)


def test_prompts_time_begins_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Prompts(monkeypatch)
    run.step({"a": -4}, PROMPT_S, "a")
    run.step({"a": 4}, PROMPT_S)
    stats = run.host.take_stats("a")
    assert stats is not None
    assert stats.prefill_ms == pytest.approx(2e3 * PROMPT_S)
