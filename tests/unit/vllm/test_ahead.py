"""Drafts take their places in steps that were scheduled before the last one's tokens were read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.errors import ConfigError
from outrider.vllm import versions
from outrider.vllm.ahead.device_choice import Chooser
from outrider.vllm.ahead.placed_drafts import PlacedDrafts
from outrider.vllm.proposer import RemoteProposer
from tests.support.services.vllm_runner import AheadRunner, OtherRank
from tests.support.services.vllm_steps import K, truth


def text(runner: AheadRunner, name: str) -> list[int]:
    return runner.requests[name].text


def told(runner: AheadRunner) -> dict[str, list[int]]:
    output = runner.told[-1]
    assert output is not None
    return dict(zip(output.names, map(list, output.emitted), strict=True))


@pytest.fixture(params=[0, 2], ids=["read before the launch", "read after the launch"])
def runner(request: pytest.FixtureRequest) -> AheadRunner:
    """A runner whose steps have ended when the next is prepared, or not yet."""
    made = AheadRunner()
    made.late = request.param
    return made


@pytest.mark.parametrize("embeds", [False, True])
def test_drafts_come_between_a_result_and_the_next_step_and_books_while_that_runs(
    embeds: bool,
) -> None:
    runner = AheadRunner()
    runner.enable_prompt_embeds = embeds  # then they are made of the drafts, too
    runner.run("a", "b", new="ab")
    runner.calls.clear()
    before = time.perf_counter()
    runner.run("a", "b")
    prepared = ["read", "prepared"] if embeds else ["prepared", "read"]
    assert runner.calls == ["awaited", *prepared, "runs", "begin 2", "launched"]
    assert runner.began is not None
    assert before <= runner.began <= runner.launched_at
    for name in "ab":
        assert told(runner)[name] == [truth(name, 3)]
    assert runner.verified == [[truth(name, 4 + i) for i in range(K)] for name in "ab"]
    assert runner._inputs == [-1, *runner.verified[0], -1, *runner.verified[1]]
    assert runner.counts == [[1, 1], [1 + K, 1 + K]]
    assert runner.latest == [truth(name, 4 + K) for name in "ab"]


def test_device_chooses_drafts_of_a_step_that_is_launched_before_the_last_result() -> None:
    runner = AheadRunner()
    runner.late = 2
    runner.run("a", "b", new="ab")
    runner.calls.clear()
    before = time.perf_counter()
    runner.run("a", "b")
    assert runner.calls == [
        *("awaited", "prepared", "runs", "added", "read", "committed", "begin 2", "launched")
    ]
    assert runner.began is not None
    assert before <= runner.launched_at <= runner.began
    assert runner.verified == [[truth(name, 4 + i) for i in range(K)] for name in "ab"]
    assert runner._inputs == [-1, *runner.verified[0], -1, *runner.verified[1]]
    assert runner.lengths == {"a": K, "b": K}


def made(runner: AheadRunner, rooms: Mapping[str, int]) -> PlacedDrafts:
    """Return right drafts for "a" alone, of three tokens."""
    length = len([token for token in runner.requests["a"].text if token >= 0])
    tokens = [truth("a", length + 1 + i) for i in range(K)]
    places = [0 if name == "a" else -1 for name in rooms]
    lengths = [3 if name == "a" else 0 for name in rooms]
    drafts = torch.tensor([tokens], dtype=torch.int32)
    return PlacedDrafts.gather(drafts, places, lengths, [*rooms.values()])


@pytest.mark.parametrize("embeds", [False, True])
def test_step_with_drafts_that_the_device_has_made_waits_for_no_result(
    runner: AheadRunner, embeds: bool
) -> None:
    runner.enable_prompt_embeds = embeds
    runner.run("a", "b", new="ab")
    assert runner.emitting == ["a", "b"]
    assert [row[:2] for row in runner.emitted] == [[0, truth(name, 3)] for name in "ab"]
    runner.made = partial(made, runner)
    runner.calls.clear()
    runner.run("a", "b")
    assert runner.calls == [
        *("awaited", "prepared", "runs", "read", "committed", "begin 2", "launched")
    ]
    assert runner.verified == [[truth("a", 4 + i) for i in range(3)] + [-1], [-1] * K]
    assert runner.lengths == {"a": 3, "b": 0}
    assert runner.prompts_of == ["a", "b"]
    assert [row[0] for row in runner.emitted] == [3, 0], "accepted of each"


def test_penalties_and_grammars_see_the_drafts_that_the_device_has_made(
    runner: AheadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.vllm.ahead.steps.draft_token_ids", lambda *given: given)
    runner.run("a", "b", new="ab")
    runner.made = partial(made, runner)
    for texts, grammar in (([], True), ([[], []], False)):
        runner.input_batch.sampling_metadata.output_token_ids = texts
        runner.calls.clear()
        runner.run("a", "b", has=grammar, asks=grammar)
        assert runner.calls[2:5] == ["runs", "read", "committed"]
        [right, none] = runner.verified
        assert (len(set(right) - {-1}), none) == (3, [-1] * K)
        assert runner.lengths == {"a": 3, "b": 0}
        assert runner.take_draft_token_ids() == (["a", "b"], [right[:3], []])
    assert runner.input_batch.spec_token_ids[:2] == [[*right[:3], 0], [0] * K]


def test_texts_are_the_truth_whatever_part_of_a_draft_is_right(runner: AheadRunner) -> None:
    runner.run("a", new="a")
    length = 4
    for runner.right in (K, 0, 2, K, 1):
        runner.run("a")
        assert text(runner, "a")[:length] == [truth("a", i) for i in range(length)]
        length += 1 + runner.right
    runner.run("a")
    output = runner.told[-1]
    assert output is not None
    assert (output.lengths, output.text(0, length)) == ([length], text(runner, "a")[:length])


def test_row_without_a_draft_emits_one_token(runner: AheadRunner) -> None:
    runner.run("a", "b", new="ab")
    runner.run("a")
    runner.run("a", "b", replaced=None)  # "b" was not in the last step: nobody drafted for it
    assert runner.verified[1] == [-1] * K
    assert runner._inputs[-K:] == [0] * K
    assert runner.counts[-1][1] == 1


def test_draft_is_as_long_as_its_room_and_steps_without_room_have_none(runner: AheadRunner) -> None:
    runner.run("a", new="a")
    runner.room = 2
    runner.run("a")
    assert runner.verified == [[truth("a", 4 + i) for i in range(2)]]
    runner.run("b", "c", new="bc")
    assert runner.counts[-1] == [1, 1]
    assert told(runner)["a"] == [truth("a", 4 + i) for i in range(3)]


def test_step_after_the_next_has_no_room_in_rows_without_drafts(runner: AheadRunner) -> None:
    runner.without = "a"
    lengths = []
    for new in ("ab", "", "", ""):
        runner.without = "a" if len(lengths) < 2 else "b"
        runner.run("a", "b", new=new)
        lengths.append([len(draft) for draft in runner.verified])
    assert lengths == [[0, 0], [K, K], [0, K], [0, K]]
    runner.run("a", "b")
    assert [len(draft) for draft in runner.verified] == [K, 0]
    for name in "ab":
        read = [token for token in text(runner, name) if token >= 0]
        assert read == [truth(name, i) for i in range(len(read))]


def test_step_without_room_for_drafts_waits_for_no_result(runner: AheadRunner) -> None:
    runner.run("a", new="a")
    runner.without = "a"
    for _ in range(3):
        runner.calls.clear()
        runner.choices.clear()
        runner.run("a")
    assert runner.verified == [[]]
    assert not runner.choices, "each rank sees it by itself"
    assert runner.calls == [
        *("awaited", "prepared", "runs", "read", "committed", "begin 1", "launched")
    ]
    assert runner.lengths == {"a": 0}
    assert runner.prompts_of == ["a"]
    runner.without = ""
    for _ in range(4):
        runner.run("a")
    read = [token for token in text(runner, "a") if token >= 0]
    assert read == [truth("a", i) for i in range(len(read))]
    assert len(read) > 3 + 2 * K


@pytest.mark.parametrize("way", ["host", "branches", "branches, then the host", "loop"])
def test_ranks_verify_what_the_first_or_its_device_chooses(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.vllm.ahead.steps.draft_token_ids", lambda *given: given)
    first = AheadRunner()
    first.late = 0 if way == "host" else 2
    if way == "branches, then the host":
        first.await_branches = lambda *_: False  # type: ignore[method-assign]
    other = OtherRank(first)
    for runner in (first, other):
        runner.run("a", "b", new="ab")
        runner.input_batch.sampling_metadata.output_token_ids = [[], []]  # of penalties
    for right in (K, 0, 2, K):
        first.right = right
        if way == "loop":
            first.made = partial(made, first)
        for runner in (first, other):
            runner.run("a", "b")
        assert other.verified == first.verified
        assert other._inputs == first._inputs
        assert other.take_draft_token_ids() == first.take_draft_token_ids()
        assert other.input_batch.spec_token_ids == first.input_batch.spec_token_ids
    assert [text(other, name) for name in "ab"] == [text(first, name) for name in "ab"]
    assert len([token for token in text(other, "a") if token >= 0]) > 8
    expected = {
        "host": [Chooser.HOST],
        "branches": [Chooser.BRANCHES, True],
        "loop": [Chooser.LOOP],
    }
    assert first.choices == expected.get(way, [Chooser.BRANCHES, False]) * 4
    with pytest.raises(StopIteration):
        other.agreed(0)


def test_row_within_its_prompt_emits_nothing(runner: AheadRunner) -> None:
    runner.within_prompt = "a"
    runner.run("a", "b", new="ab")
    runner.run("b")
    assert told(runner) == {"a": [], "b": [truth("b", 3)]}
    assert runner.told[-1].lengths == [3, 4]  # type: ignore[union-attr]


def test_ended_request_emits_no_more_and_its_name_may_come_back(runner: AheadRunner) -> None:
    runner.run("a", "b", new="ab")
    runner.run("a", "b")  # "a" has ended; that step was scheduled before it was known
    runner.run("a", "b", new="a", finished="a")
    assert "a" not in told(runner)
    runner.run("a", "b")
    assert told(runner)["a"] == [truth("a", 3)]
    assert text(runner, "a")[:4] == [truth("a", i) for i in range(4)]


def test_preempted_text_goes_on_where_vllm_says(runner: AheadRunner) -> None:
    runner.run("a", "b", new="ab")
    runner.run("a", "b")
    runner.run("b")  # what "a" emitted is told, though it is not in this step
    assert told(runner)["a"] == [truth("a", 4 + i) for i in range(1 + K)]
    kept = [truth("a", i) for i in range(6)]  # some tokens were dropped on the way
    runner.run("a", "b", replaced={"a": kept})
    runner.run("a", "b")
    assert told(runner)["a"] == [truth("a", 6)]
    assert text(runner, "a")[:7] == [truth("a", i) for i in range(7)]


def test_step_of_nothing_tells_what_was_emitted() -> None:
    runner = AheadRunner()
    runner.run("a", new="a")
    runner.calls.clear()
    runner.run(finished="a")
    assert runner.calls == ["read", "begin 0", "launched"]
    assert told(runner) == {}
    runner.run("b", new="b")
    assert runner.told[-1] is None


@pytest.mark.parametrize(("asks", "drafted"), [(True, K), (False, 0)])
def test_grammar_that_is_not_asked_about_drafts_gets_none(
    asks: bool, drafted: int, runner: AheadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.vllm.ahead.steps.draft_token_ids", lambda *given: given)
    runner.run("a", new="a")
    if not asks:
        runner.made = lambda _: pytest.fail("it was asked")
    runner.run("a", has=True, asks=asks)
    draft = [truth("a", 4 + i) for i in range(drafted)]
    assert runner.verified == [draft + [-1] * (K - drafted)]
    names, drafts = runner.take_draft_token_ids()
    drafts[0].append(7)
    assert (names, runner.take_draft_token_ids()[1]) == (["a"], [draft])


def test_penalties_see_the_drafts_that_are_verified(runner: AheadRunner) -> None:
    runner.input_batch.sampling_metadata.output_token_ids = [[], []]
    runner.run("a", "b", new="ab")
    runner.run("a")
    runner.run("a", "b")  # nothing is drafted for "b"
    assert runner.input_batch.spec_token_ids[:2] == [runner.verified[0], [0] * K]


def test_sampling_that_is_not_coupled_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "untried", lambda: "")
    plugin: Any = object.__new__(RemoteProposer)
    served = SimpleNamespace(seed=0)
    vars(plugin).update(_runner=None, _served=served, _ahead=True, _features=None)
    with pytest.raises(ConfigError, match=r"--async-scheduling .* --logprobs-mode"):
        plugin.bind(SimpleNamespace())
