"""The policy that docs/another-policy.md shows, as the page writes it."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from outrider.config import EngineConfig
from outrider.params import SamplingParams, StopParams
from outrider.types import Request
from tests.support.simulators.simulation import Net, World, draft_model

PAGE = Path(__file__).parents[3] / "docs/another-policy.md"


def test_policy_of_the_page_drafts_what_is_likely_and_is_faster_than_none() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], names)
    times = {}
    for k in (0, 4):
        config = EngineConfig(page_size=4, num_pages=512, max_model_len=256)
        world = World(names["LikelyTokens"](k), config, lambda _: 0.005, random.Random(1))
        world.add(draft_model(0.05), Net())
        sampling, stop = SamplingParams(temperature=0.0), StopParams(max_tokens=100)
        world.submit(Request(1, (7, 1, 5), sampling, stop))
        world.run()
        times[k] = world.now
    stats = world.last[1].stats
    assert stats is not None
    assert stats.accepted > 0.6 * stats.drafted > 0
    assert times[4] < 0.6 * times[0]
