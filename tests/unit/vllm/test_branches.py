"""The device chooses drafts by how the running step ends, which the host reads later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.draft_tree import DraftTree
from outrider.policy.draft_times import DraftTimes
from outrider.vllm.ahead.branch_table import BranchTable
from tests.support.services.vllm_runner import AheadRunner
from tests.support.services.vllm_steps import K, VllmSteps, truth

CPU = torch.device("cpu")


class Served:
    """Steps of a runner around the real plug-in, and a proposer that drafts ahead."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, names: str, *, runs_ahead: bool = True
    ) -> None:
        self.steps = VllmSteps(monkeypatch, names=())
        self.plugin = self.steps.plugin
        self.plugin._ahead = True
        self.proposer = self.steps.attach(runs_ahead=runs_ahead)
        self.runner = AheadRunner(self.plugin)
        self.runner.late = 2
        self.names = names
        for name in names:
            self.steps.texts[name] = [truth(name, i) for i in range(3)]
        self.runner.run(*names, new=names)

    def text(self, name: str) -> list[int]:
        return [token for token in self.runner.requests[name].text if token >= 0]

    def block(self, name: str, base: int, *branches: tuple[int, list[int]]) -> Any:
        """A chain of what is right from `base` on, with branches after so many of its tokens."""
        chain = [truth(name, base + i) for i in range(K)]
        tree = DraftTree.branched(base, chain, branches)
        fields = {"base_len": base, "token_ids": tree.token_ids, "parents": tree.parents}
        return self.steps.block(name, **fields)

    def right(self, name: str, start: int, length: int = K) -> list[int]:
        return [truth(name, start + i) for i in range(length)]


async def test_branch_at_hand_is_verified_in_the_next_step_and_one_that_is_wrong_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, "ab")
    # Each row's first token was drawn, and is not read yet: both drafts go on after it.
    served.steps.post(served.proposer, served.block("a", 3), served.block("b", 3))
    served.runner.run("a", "b")
    assert served.runner.verified == [
        [*served.right("a", 4, K - 1), -1],
        [*served.right("b", 4, K - 1), -1],
    ]
    # All that is verified is right: "a" has a branch after the token that follows, "b" a wrong one.
    after = served.right("a", 3 + K)
    wrong = [served.right("b", 3 + K)[0] + 1, *served.right("b", 4 + K)]
    served.steps.post(
        served.proposer,
        served.block("a", 3, (K, [*after, truth("a", 3 + 2 * K)])),
        served.block("b", 3, (K, wrong)),
    )
    served.runner.run("a", "b")
    assert served.runner.verified == [served.right("a", 4 + K), [-1] * K]
    served.runner.run("a", "b")
    for name in "ab":
        text = served.text(name)
        assert text == served.right(name, 0, len(text))
    stats = served.steps.host.take_stats("a")
    assert stats is not None
    assert stats.accepted == (K - 1) + K


async def test_branches_are_written_as_they_come_and_waited_for_until_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, "ab")
    table, written = BranchTable(8, K, CPU), []
    write = table.write
    monkeypatch.setattr(table, "write", lambda *given: (written.append(given), write(*given)))

    def foresees(*looks: bool) -> bool:
        """Look at the result in turn; a draft of "b" comes behind the first look."""
        seen = iter(looks)

        def known() -> bool:
            served.steps.post(served.proposer, served.block("b", 3))
            return next(seen)

        table.clear(2)
        assert served.plugin.write_branches({"a": 0, "b": 1}, table)
        return served.plugin.await_branches(table, known)

    served.steps.post(served.proposer, served.block("a", 3))
    assert not foresees(True)
    assert written == [(0, 1, truth("a", 3), (*served.right("a", 4, K - 1),))]
    assert foresees(False, True)
    assert written[-1] == (1, 1, truth("b", 3), (*served.right("b", 4, K - 1),))


async def test_branches_that_come_after_the_launch_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, "a")
    monkeypatch.setattr(served.steps.host._policy, "may_gain_by_waiting", lambda *_: False)
    table, written = BranchTable(8, K, CPU), []
    table.clear(1)
    monkeypatch.setattr(table, "write", lambda *given: written.append(given))
    assert served.plugin.write_branches({"a": 0}, table)
    assert served.plugin.await_branches(table, lambda: False)
    assert not written
    served.steps.post(served.proposer, served.block("a", 3))
    looks = iter([False, True])
    served.plugin.add_branches(table, lambda: next(looks))
    assert written == [(0, 1, truth("a", 3), (*served.right("a", 4, K - 1),))]


async def test_result_is_looked_for_while_blocks_keep_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, "ab")
    table, looks = BranchTable(8, K, CPU), iter([False, False, True])
    table.clear(2)
    served.steps.post(served.proposer, served.block("a", 3))
    assert served.plugin.write_branches({"a": 0, "b": 1}, table)
    take, posts = served.steps.host.take, iter(range(100))

    def taking(timeout_s: float) -> Any:
        next(posts)
        served.steps.post(served.proposer, served.block("a", 3))  # "b" still has none
        return take(timeout_s)

    monkeypatch.setattr(served.steps.host, "take", taking)
    assert not served.steps.host.await_branches(table, lambda: next(looks))


def never() -> bool:
    raise AssertionError("nothing is to be waited for")


@pytest.mark.parametrize(("room", "waits"), [(1, False), (2, True)])
async def test_step_waits_for_no_branches_of_rows_without_room_for_any(
    room: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(monkeypatch, "ab")
    host, table = served.steps.host, BranchTable(8, K, CPU)
    table.clear(2)
    served.steps.post(served.proposer, served.block("a", 3))
    host.take_early()
    assert host.write_branches({"a": 0}, table)  # "b" is within its prompt
    assert host.await_branches(table, never)
    host._rows["b"].max_len = 3 + room + 1  # of which the running step emits one
    assert host.write_branches({"a": 0, "b": 1}, table)
    assert host.await_branches(table, (lambda: True) if waits else never) is not waits


def test_rows_without_room_have_no_place_for_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, places = AheadRunner(), []
    runner.late = 2
    monkeypatch.setattr(runner, "write_branches", lambda given, _: bool(places.append(given)))
    runner.run("a", new="a")
    runner.run("b", "a", new="b")
    assert places == [{"a": 1}]


async def test_host_chooses_for_proposers_that_await_the_result_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, "a", runs_ahead=False)
    host, table = served.steps.host, BranchTable(8, K, CPU)
    table.clear(1)
    assert host.write_branches({"a": 0}, table)
    assert not host.await_branches(table, never)


async def test_draft_that_the_device_did_not_see_is_late_and_no_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, "a")
    host = served.steps.host
    monkeypatch.setattr(host._policy, "may_gain_by_waiting", lambda *_: False)
    add = host.add_branches

    def adding(*args: Any) -> None:
        served.steps.post(served.proposer, served.block("a", 3))
        add(*args)

    with monkeypatch.context() as patch:
        patch.setattr(host, "add_branches", adding)
        served.runner.run("a")
    assert served.runner.verified == [[-1] * K]
    stats = host.take_stats("a")
    assert stats is not None
    assert (stats.hits, stats.misses_late) == (0, 1)
    served.runner.run("a")  # what was late is still true
    assert served.runner.verified == [[*served.right("a", 5, K - 2), -1, -1]]
    stats = host.take_stats("a")
    assert stats is not None
    assert (stats.hits, stats.misses_late) == (1, 1)


@pytest.mark.parametrize("late", [0, 2], ids=["read before the launch", "read after the launch"])
async def test_drafts_that_come_while_a_step_runs_are_made_beside_it(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, beside = Served(monkeypatch, "a"), []
    served.runner.late = late
    monkeypatch.setattr(served.steps.host._policy, "may_gain_by_waiting", lambda *_: False)
    observe = DraftTimes.observe

    def observing(*args: Any, alone: bool) -> None:
        beside.append(not alone)
        observe(*args, alone=alone)

    monkeypatch.setattr(DraftTimes, "observe", observing)
    served.steps.post(served.proposer, served.steps.block("a", 1, base_len=3))
    for _ in range(2):
        served.runner.run("a")
    served.steps.post(served.proposer, served.block("a", 5))
    served.steps.host.take_early()
    served.steps.host.take_stats("a")  # after which all that came is noted
    assert beside == [True]


async def test_device_chooses_nothing_where_states_are_read_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, "a")
    table = BranchTable(8, K, CPU)
    table.clear(1)
    assert served.plugin.write_branches({"a": 0}, table)
    served.steps.host.keep(SimpleNamespace(on_thread=None))  # type: ignore[arg-type]
    assert not served.plugin.write_branches({"a": 0}, table)


async def test_fault_while_branches_are_written_costs_drafts_and_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, "a")
    served.steps.post(served.proposer, served.block("a", 3))
    for name in ("write_branches", "await_branches", "add_branches", "chosen"):
        with monkeypatch.context() as patch:
            patch.setattr(served.steps.host, name, None)
            served.runner.run("a")
    served.runner.run("a")
    text = served.text("a")
    assert text == served.right("a", 0, len(text))
    assert len(text) >= 3 + 4
