"""What is asked of vLLM's processes has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import DeadlineError
from outrider.types import EngineInfo
from outrider.vllm import accounts
from outrider.vllm.accounts import Accounts
from outrider.vllm.engine import VllmEngine
from outrider.vllm.flags import VllmOptions


async def hang(*_: object) -> Any:
    await asyncio.Event().wait()


async def test_accounts_after_a_call_that_hangs_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts, "_TIMEOUT_S", 0.02)
    asked: list[Sequence[str]] = []

    async def ask(names: Sequence[str]) -> dict[str, dict[str, Any]]:
        asked.append(names)
        return await hang() if len(asked) == 1 else {name: {"rounds": 1} for name in names}

    told = Accounts(ask)
    assert await told.ask("a") is None
    assert await told.ask("b") in (None, {"rounds": 1})  # the first call may be just ending
    assert await told.ask("c") == {"rounds": 1}
    assert asked[0] == ("a",)


async def test_warm_up_that_vllm_does_not_answer_ends_at_its_deadline() -> None:
    engine = VllmEngine(Path, VllmOptions("model", "name", "bfloat16"), lambda _: None)
    engine._llm = SimpleNamespace(collective_rpc=hang)
    engine._info = EngineInfo(8, 8, frozenset(), 1, 8, 1, 1, 1)
    engine.draft_target = "unix:drafts"
    with pytest.raises(DeadlineError, match=r"within 0\.01 s"):
        await engine.warm_up(0.01)
