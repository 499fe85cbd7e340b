"""The proposer that docs/writing-a-proposer.md shows drafts for a scorer as it stands there."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import DEVNULL
from pathlib import Path

from tests.support.services.scorer import running_scorer

PAGE = Path(__file__).parents[2] / "docs/writing-a-proposer.md"
PERIOD = [3, 1, 4] * 4


async def test_proposer_of_the_page_drafts_and_changes_no_text(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = tmp_path / "my_proposer.py"
    program.write_text(code)
    async with running_scorer() as scorer:
        plain = [
            await scorer.generate(PERIOD, temperature=1.0, seed=seed, enabled=False)
            for seed in range(4)
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(program), scorer.address, stdout=DEVNULL
        )
        try:
            await scorer.until(lambda: len(scorer.hub.registry.proposers) == 1, "Hello", 30)
            drafted = [
                await scorer.generate(PERIOD, temperature=1.0, seed=seed) for seed in range(4)
            ]
        finally:
            process.kill()
            await process.wait()
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
        assert {*drafted[0].aux_info.proposer_ids} == {"my-proposer"}
        assert sum(output.aux_info.drafted for output in drafted) > 0
        assert scorer.metric("draft_blocks_total", fate="malformed") == 0
