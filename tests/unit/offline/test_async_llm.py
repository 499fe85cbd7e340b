from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from outrider import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from outrider.errors import InvalidRequestError, PromptTooLongError
from outrider.offline.engine import LocalEngine
from outrider.offline.places import Places

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def llm(engine: list[object], pair: tuple[Path, Path]) -> AsyncLLM:
    loaded = AsyncLLM(str(pair[0]))
    assert len(engine) == 1
    return loaded


async def outputs_of(
    llm: AsyncLLM, prompt: str, params: SamplingParams, request_id: str | None = None
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id)]


async def until_idle(engine: LocalEngine) -> None:
    async with asyncio.timeout(10):
        while engine._runs:  # noqa: ASYNC110  # another loop's
            await asyncio.sleep(0.002)


async def test_generate_yields_all_so_far_or_what_is_new(llm: AsyncLLM) -> None:
    delta = SamplingParams(
        temperature=0.0, max_tokens=24, output_kind=RequestOutputKind.DELTA, logprobs=0
    )
    cumulative, pieces = await asyncio.gather(
        outputs_of(llm, "def fib(n):", GREEDY), outputs_of(llm, "def fib(n):", delta)
    )
    texts = [output.outputs[0].text for output in cumulative]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert [output.finished for output in cumulative] == [False] * (len(texts) - 1) + [True]
    assert len(texts) > 1
    assert "".join(output.outputs[0].text for output in pieces) == texts[-1]
    assert len({output.request_id for output in cumulative}) == 1


async def test_abort_of_a_running_request_ends_it_with_its_reason(
    llm: AsyncLLM, shared_engine: LocalEngine
) -> None:
    outputs: list[RequestOutput] = []
    async for output in llm.generate("x", ENDLESS, "mine"):
        if not outputs:
            with pytest.raises(InvalidRequestError, match="mine is under way"):
                await anext(llm.generate("y", ENDLESS, "mine"))
            await llm.abort("mine")
        outputs.append(output)
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].request_id == "mine"
    await llm.abort("mine")  # no-op for one that has ended
    await until_idle(shared_engine)


async def test_abort_of_a_request_that_waits_gives_a_last_output(
    llm: AsyncLLM, shared_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()

    async def wait(_: Places, __: int) -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Places, "take", wait)
    params = SamplingParams(n=2, max_tokens=4)
    reading = asyncio.create_task(outputs_of(llm, "x", params, "mine"))
    assert await asyncio.to_thread(waiting.wait, 10)
    await llm.abort("mine")
    async with asyncio.timeout(10):
        [output] = await reading
    assert output.finished
    assert (output.request_id, output.prompt) == ("mine", "x")
    assert [each.finish_reason for each in output.outputs] == ["abort", "abort"]
    await until_idle(shared_engine)


async def test_generate_when_reader_is_cancelled_ends_its_request(
    llm: AsyncLLM, shared_engine: LocalEngine
) -> None:
    reading = asyncio.create_task(outputs_of(llm, "x", ENDLESS))
    while not shared_engine._runs:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until_idle(shared_engine)


async def test_generate_with_error_in_one_request_finishes_the_others(llm: AsyncLLM) -> None:
    refused, answered = await asyncio.gather(
        outputs_of(llm, "code " * 300, ENDLESS),
        outputs_of(llm, "x", GREEDY),
        return_exceptions=True,
    )
    assert isinstance(refused, PromptTooLongError)
    assert isinstance(answered, list)
