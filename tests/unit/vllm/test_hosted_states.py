"""Hidden states of vLLM's target: whose rows are sent after a step, and when matrices are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.step import RowSlots
from outrider.errors import ConfigError
from outrider.features import FeatureBatch, FeatureOrder, FeatureSpec, FeatureWindow
from outrider.policy.row import Drafting, Offered
from outrider.types import Request
from outrider.vllm import adapter
from outrider.vllm.hidden_states.capture import hand_out_layers
from outrider.vllm.hidden_states.hosted import HostedStates
from outrider.vllm.hosted_row import HostedRow

PAGE_SIZE, SPEC = 4, FeatureSpec(8, (), True)
PAGES = {"a": (2, 5), "b": (1, 3)}


class World:
    """Requests "a" and "b" of five tokens each; the state in a slot is the slot's number."""

    def __init__(self) -> None:
        pool = HiddenStatePool(SPEC, 6, PAGE_SIZE, torch.device("cpu"))
        pool.rows.copy_(torch.arange(6.0 * PAGE_SIZE)[:, None].expand(-1, 8))
        self.asked: list[str] = []
        self.states = HostedStates(pool, self._located, lambda: RowSlots(torch.arange(0), ()))
        self.rows: dict[int, HostedRow] = {}
        self.window = FeatureWindow()
        for session_id, name in enumerate(PAGES, 1):
            drafting = Drafting(Offered(4), num_draft_tokens=4)
            row = HostedRow(
                name,
                Request(session_id, (7,) * 5),
                drafting,
                max_len=30,
                stop_ids=frozenset(),
                started_at=0.0,
            )
            self.rows[session_id] = row
            self.states.follow(row, FeatureOrder(1, SPEC, self.window))

    def _located(self, name: str) -> tuple[int, Sequence[int]]:
        self.asked.append(name)
        return 3, PAGES[name]  # of a prompt that is computed in parts

    def collect(self, names: Sequence[str], advanced: Sequence[int]) -> dict[str, list[int]]:
        """Return the slots whose states are sent after a step, by request."""
        self.asked.clear()
        rows = [self.rows[session_id] for session_id in advanced]
        return self.slots(self.states.collect(self.rows, names, rows))

    def slots(self, batch: FeatureBatch | None) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        self.sent = batch.rows if batch else ()
        for part in self.sent:
            states = torch.frombuffer(bytearray(part.rows), dtype=torch.bfloat16).view(-1, 8)
            slots = found.setdefault(self.rows[part.session_id].name, [])
            slots += states[:, 0].int().tolist()
        return found


def test_states_are_sent_of_what_is_computed_and_committed() -> None:
    world = World()
    assert world.collect(["a", "b"], [1]) == {"a": [8, 9, 10, 11], "b": [4, 5, 6]}
    assert world.collect(["a", "b"], [1]) == {}, "once"
    world.rows[1].token_ids += [7, 7]
    world.rows[2].token_ids += [7]
    assert world.collect(["b", "a"], [1, 2]) == {"a": [20, 21], "b": [7, 12]}


def test_states_of_prompts_are_sent_once_though_the_next_step_runs_before_the_result() -> None:
    world = World()
    world.states.begin_prompts([world.rows[2]])  # three tokens of it are computed
    assert world.rows[1].num_computed == 0
    assert world.collect(["a", "b"], [1, 2]) == {"a": [8, 9, 10, 11], "b": [4, 5, 6, 7]}
    parts = [part for part in world.sent if part.session_id == 2]
    assert [part.start for part in parts] == [0, 3]


def test_request_that_a_step_did_not_have_sends_nothing() -> None:
    """Its pages may be another's: nobody is asked where they are."""
    world = World()
    assert world.collect(["b"], [2]) == {"b": [4, 5, 6, 7]}
    assert world.asked == ["b"]
    world.rows[1].ended = True
    assert world.collect(["a"], []) == {}
    assert world.asked == []


def test_nothing_is_sent_after_a_step_whose_states_were_lost() -> None:
    world = World()
    world.states.broken = True
    assert world.collect(["a", "b"], [1, 2]) == {}
    for row in world.rows.values():
        world.states.follow(row, None)
        world.states.follow(row, FeatureOrder(2, SPEC, world.window))
    assert not world.states._streams.any, "nobody would forget them when they end"


def test_room_that_is_given_back_counts_when_the_next_step_ends() -> None:
    world = World()
    world.collect(["a", "b"], [1, 2])
    taken = world.window.on_the_way
    assert taken == 8 * SPEC.row_bytes
    world.states.give_back(world.window, taken)
    assert world.window.on_the_way == taken
    world.collect([], [])
    assert world.window.on_the_way == 0


def test_projections_wait_until_vllm_has_captured_its_graphs() -> None:
    pool = HiddenStatePool(FeatureSpec(8, (), True), 1, 1, torch.device("cpu"))
    states = HostedStates(pool, lambda _: (0, ()), lambda: RowSlots(torch.arange(0), ()))
    matrix = bytes(4 * 8 * 2)
    spec = FeatureSpec(8, (), True, 4, hashlib.sha256(matrix).digest())
    futures = [states.put_projection(spec, bytearray(matrix)) for _ in range(2)]
    assert not wait(futures, 0.2).done
    states.begin()
    futures.append(states.put_projection(spec, bytearray(matrix)))
    assert len(wait(futures, 30).done) == 3
    assert [future.result() for future in futures] == [None] * 3
    failed = states.put_projection(spec, bytearray(2))
    assert failed.exception(30)


class Target(torch.nn.Module):
    """A model that hands out states of so many layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.num_layers, self.runs = num_layers, 0

    def forward(self) -> Any:
        self.runs += 1
        layers = [torch.zeros(1)] * self.num_layers
        return (torch.zeros(1), layers) if layers else torch.zeros(1)


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_model_that_leaves_a_layer_out_ends_the_start(
    num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "hands_out_layers", lambda _: True)
    model = Target(num_layers)
    runner = SimpleNamespace(
        get_model=lambda: model, _setup_eagle3_aux_hidden_state_outputs=lambda: None
    )
    hand_out_layers(runner, FeatureSpec(8, (2, 8), True))
    if num_layers == 2:
        model()
        model.num_layers = 0  # the first run tells
        model()
        assert model.runs == 2
        return
    with pytest.raises(ConfigError, match=rf"2,8,final: vLLM's Target hands out {num_layers} of"):
        model()
