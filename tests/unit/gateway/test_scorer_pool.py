"""Which scorer a request goes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from gateway.routing.scorers import ScorerPool
from outrider.rpc.targets import Target, Targets

NOBODY: frozenset[Any] = frozenset()
KEYS = [f"conversation {n}".encode() for n in range(400)]


@dataclass(eq=False)
class Idle:
    """Has the facts that a pool asks of a scorer."""

    target: str
    in_flight: int = 0
    serving: bool = True


def pool(*scorers: Idle) -> ScorerPool:
    made = ScorerPool(Targets(("127.0.0.1:1",)), lambda _: None)
    made._scorers = {Target(each.target): cast("Any", each) for each in scorers}
    return made


def scorers(count: int) -> list[Idle]:
    return [Idle(f"10.0.0.{n}:7001") for n in range(count)]


async def places(chosen_from: ScorerPool) -> dict[bytes, str]:
    return {key: (await chosen_from.pick(key, NOBODY, 1.0)).target for key in KEYS}


@pytest.mark.parametrize("count", [2, 3, 8])
async def test_pool_when_scorer_joins_or_goes_moves_its_share_alone(count: int) -> None:
    some = scorers(count + 1)
    new = some[-1].target
    before, after = await places(pool(*some[:-1])), await places(pool(*some))
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {new}
    assert 0.5 < len(moved) / (len(KEYS) / (count + 1)) < 1.5
    for target in {each.target for each in some}:
        assert list(after.values()).count(target) > len(KEYS) / (count + 1) / 2


@pytest.mark.parametrize(("count", "in_flight"), [(4, 128), (8, 512), (2, 32)])
async def test_pool_at_even_load_keeps_affinity_within_the_bound(
    count: int, in_flight: int
) -> None:
    """The oldest requests end first. Of conversations that come back most find their scorer."""
    some = scorers(count)
    used = pool(*some)
    home, running, back = await places(used), [], 0
    for key in KEYS * 2:
        scorer = await used.pick(key, NOBODY, 1.0)
        mean = sum(each.in_flight for each in some) / count
        assert scorer.in_flight <= max(min(each.in_flight for each in some) + 4, 1.25 * mean)
        back += scorer.target == home[key]
        scorer.in_flight += 1
        running.append(scorer)
        if len(running) > in_flight:
            running.pop(0).in_flight -= 1
    assert back > 0.9 * len(KEYS) * 2


async def test_pool_when_all_ask_the_same_uses_the_others_too() -> None:
    some = scorers(4)
    used = pool(*some)
    for _ in range(400):
        (await used.pick(b"one prompt", NOBODY, 1.0)).in_flight += 1
    loads = sorted(each.in_flight for each in some)
    assert loads[-1] <= 1.25 * 100 + 1
    assert loads[0] >= 90
