"""The gateway and its scorers: resuming, routing, and scorers that do not fit."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import httpx
import openai
import pytest

from outrider.errors import CapacityError, ConfigError, UnavailableError
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.support.ports import reserved_port
from tests.support.services.fake_scorer import FakeScorer, Script, serving
from tests.support.services.gateway import Running, fake_scorer, running_gateway, tokens
from tests.support.waiting import until

TEXT = "hello world, the quick brown fox jumps over the lazy dog; naïve café 日本語 🎉"
PROMPT = [5, 6, 7]


def scripted(**changes: Any) -> Script:
    return Script(tokens(TEXT), prompt_len=len(PROMPT), **changes)


async def complete(gateway: Running, **parameters: Any) -> Any:
    asked = {"prompt": PROMPT, "extra_body": {"aux_info": True}} | parameters
    return await gateway.client.completions.create(model="default", **asked)


def requests_of(scorers: list[FakeScorer]) -> list[Any]:
    return [request for scorer in scorers for request in scorer.requests]


@pytest.mark.parametrize(
    "dies_as",
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),  # from Envoy
    ],
)
async def test_request_when_scorer_dies_continues_on_another(
    dies_as: tuple[grpc.StatusCode, str],
) -> None:
    # Whichever is asked first dies after 6 tokens; each dies only once.
    dying = scripted(die_after=6, dies_as=dies_as, delay_s=0.05)
    scorers = [fake_scorer(replace(dying), name) for name in ("a", "b")]
    async with running_gateway(*scorers) as gateway:
        task = asyncio.create_task(complete(gateway, seed=7, max_tokens=100))
        await until(lambda: bool(requests_of(scorers)))
        first, second = sorted(scorers, key=lambda scorer: not scorer.requests)
        second.script.die_after = None
        answer = await task
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(tokens(TEXT))
    assert answer.usage.prompt_tokens == len(PROMPT)
    (one,), (two,) = first.requests, second.requests
    assert list(two.prompt_token_ids) == [*PROMPT, *tokens(TEXT)[:6]]
    assert two.sampling == one.sampling
    assert two.sampling.seed == 7
    assert two.stop.max_tokens == one.stop.max_tokens - 6
    aux_info = answer.aux_info
    assert aux_info["retries"] == 1
    assert aux_info["output_len"] == len(tokens(TEXT))
    rest = len(tokens(TEXT)) - 6
    assert aux_info["rounds"] == 3 + (rest + 1) // 2
    assert aux_info["accepted"] == 3 + rest // 2
    assert aux_info["scorer_id"] == second.info.scorer_id


@pytest.mark.usefixtures("quick_probes")
@pytest.mark.parametrize("stream", [False, True])
async def test_request_when_only_scorer_returns_continues(stream: bool) -> None:
    scorer, port = fake_scorer(scripted(delay_s=0.02)), reserved_port()
    async with AsyncExitStack() as life:
        await life.enter_async_context(serving(scorer, port))
        async with running_gateway(scorer) as gateway:

            async def ask() -> str:
                if not stream:
                    return str((await complete(gateway)).choices[0].text)
                chunks = await complete(gateway, stream=True)
                return "".join([chunk.choices[0].text async for chunk in chunks])

            task = asyncio.create_task(ask())
            await until(lambda: scorer.running == 1)
            await asyncio.sleep(0.1)
            await life.aclose()  # all its connections break
            async with asyncio.timeout(30), httpx.AsyncClient(base_url=gateway.http) as client:
                while (await client.get("/health")).status_code != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            async with serving(scorer, port):
                assert await task == TEXT
            assert len(scorer.requests) == 2
            assert len(scorer.requests[1].prompt_token_ids) > len(PROMPT)


async def test_request_when_only_scorer_stays_away_ends_with_error() -> None:
    scorer = fake_scorer(scripted(die_after=4))
    async with running_gateway(scorer, resume_timeout_s=0.5) as gateway:
        stream = await complete(gateway, stream=True)
        scorer.script.refuse = UnavailableError("gone")
        text = ""
        with pytest.raises(openai.APIError):  # noqa: PT012
            async for chunk in stream:
                text += chunk.choices[0].text
        assert text
        assert TEXT.startswith(text)


async def test_request_that_kills_every_scorer_is_given_up() -> None:
    """Else the request that is the cause would end the whole fleet."""
    gone = UnavailableError("gone")
    scorers = [fake_scorer(scripted(refuse=gone), name) for name in "abcdef"]
    async with running_gateway(*scorers) as gateway:
        await until_serving(gateway.http, len(scorers))
        with pytest.raises(openai.InternalServerError) as caught:
            await complete(gateway)
        assert caught.value.status_code == 503
        assert len(requests_of(scorers)) == 4
        assert gateway.metric("gateway_retries_total") == 3, "told though the request failed"


async def test_request_that_progresses_outlives_any_number_of_scorers() -> None:
    scorers = [fake_scorer(scripted(die_after=2), name) for name in "abcdef"]
    async with running_gateway(*scorers) as gateway:
        await until_serving(gateway.http, len(scorers))
        answer = await complete(gateway, max_tokens=12)
        assert answer.usage.completion_tokens == 12
        assert TEXT.startswith(answer.choices[0].text)
        assert answer.aux_info["retries"] == len(requests_of(scorers)) - 1 == 5


@pytest.mark.usefixtures("quick_probes")
async def test_request_resumed_at_full_scorer_waits() -> None:
    scorer = fake_scorer(scripted(die_after=6))
    async with running_gateway(scorer) as gateway:
        stream = await complete(gateway, stream=True)
        first = await anext(stream)
        scorer.script.refuse = CapacityError("full")
        await until(lambda: len(scorer.requests) >= 3)
        scorer.script.refuse = scorer.script.die_after = None
        rest = [chunk.choices[0].text async for chunk in stream]
        assert first.choices[0].text + "".join(rest) == TEXT


@pytest.mark.usefixtures("quick_probes")
async def test_request_whose_scorer_failed_before_a_token_waits_at_a_full_one() -> None:
    scorer = fake_scorer(scripted(refuse=UnavailableError("gone")))
    async with running_gateway(scorer) as gateway:
        answer = asyncio.create_task(complete(gateway))
        await until(lambda: len(scorer.requests) >= 1)
        scorer.script.refuse = CapacityError("full")
        await until(lambda: len(scorer.requests) >= 4)
        scorer.script.refuse = None
        assert (await answer).choices[0].text == TEXT


async def test_request_resumed_at_scorer_that_stays_full_ends_with_error() -> None:
    scorer = fake_scorer(scripted(die_after=6))
    async with running_gateway(scorer, resume_timeout_s=0.5) as gateway:
        stream = await complete(gateway, stream=True)
        scorer.script.refuse = CapacityError("full")
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def until_serving(http: str, count: int) -> None:
    """The gateway starts with the first scorer that serves; who gets a page depends on all."""
    async with asyncio.timeout(20), httpx.AsyncClient(base_url=http) as client:
        while (await client.get("/health")).json()["scorers_serving"] < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_routing_when_scorer_is_full_takes_another() -> None:
    scorers = [fake_scorer(scripted(), name) for name in ("a", "b")]
    async with running_gateway(*scorers) as gateway:
        await until_serving(gateway.http, 2)
        await complete(gateway)
        first, second = sorted(scorers, key=lambda scorer: not scorer.requests)
        first.script.refuse = CapacityError("full")
        assert (await complete(gateway)).choices[0].text == TEXT
        assert (len(first.requests), len(second.requests)) == (2, 1)
        second.script.refuse = CapacityError("full")
        with pytest.raises(openai.RateLimitError):
            await complete(gateway)


SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 2}


async def chat(gateway: Running, turns: list[str], **more: Any) -> None:
    """The turns of the user, with an answer between each two."""
    said = [[{"role": "user", "content": turn}] for turn in turns]
    answer = {"role": "assistant", "content": TEXT}
    messages: Any = [SYSTEM, *said[0], *(m for turn in said[1:] for m in (answer, *turn))]
    await gateway.client.chat.completions.create(model="default", messages=messages, **more)


def who_got_it(scorers: list[FakeScorer]) -> str:
    """The scorer of the only request since the last call."""
    (name,) = [scorer.info.scorer_id for scorer in scorers if scorer.requests]
    for scorer in scorers:
        scorer.requests.clear()
    return name


async def test_turns_of_conversations_find_their_scorer_again() -> None:
    """Though all conversations have the same system prompt."""
    scorers = [fake_scorer(scripted(), name) for name in ("a", "b", "c", "d")]
    async with running_gateway(*scorers) as gateway:
        await until_serving(gateway.http, 4)
        used = set()
        for number in range(16):
            found = set()
            for turns in (1, 2, 3):
                await chat(gateway, [f"question {number}", "and then?", "why?"][:turns])
                found.add(who_got_it(scorers))
            assert len(found) == 1
            used |= found
        assert len(used) > 1


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_requests_of_the_same_cache_key_find_one_scorer(kind: str) -> None:
    scorers = [fake_scorer(scripted(), name) for name in ("a", "b", "c", "d")]
    async with running_gateway(*scorers) as gateway:
        await until_serving(gateway.http, 4)
        found: dict[str, set[str]] = {f"key {n}": set() for n in range(16)}
        for number in range(3):
            for key, names in found.items():
                body = {"prompt_cache_key": key}
                if kind == "chat":
                    await chat(gateway, [f"question {number}"], extra_body=body)
                else:
                    await complete(gateway, prompt=f"{number}: a text", extra_body=body)
                names.add(who_got_it(scorers))
        assert all(len(names) == 1 for names in found.values())
        assert len(set.union(*found.values())) > 1


async def test_routing_of_same_first_page_keeps_scorer_until_busy() -> None:
    scorers = [fake_scorer(scripted(), name) for name in ("a", "b", "c")]
    async with running_gateway(*scorers) as gateway:
        await until_serving(gateway.http, 3)
        for _ in range(6):
            await complete(gateway)
        assert sorted(len(scorer.requests) for scorer in scorers) == [0, 0, 6]
        for scorer in scorers:
            scorer.script.delay_s = 0.05
        await asyncio.gather(*(complete(gateway) for _ in range(16)))
        assert sorted(len(scorer.requests) for scorer in scorers)[1] >= 4


async def test_routing_of_prompts_that_begin_alike_uses_all_scorers() -> None:
    """As with one system prompt for all: no scorer is left idle while others are busy."""
    scorers = [fake_scorer(scripted(delay_s=0.1), name) for name in ("a", "b", "c", "d")]
    async with running_gateway(*scorers) as gateway:
        await until_serving(gateway.http, 4)
        await asyncio.gather(*(complete(gateway) for _ in range(40)))
    shares = sorted(len(scorer.requests) for scorer in scorers)
    assert sum(shares) == 40
    assert shares[-1] - shares[0] <= 5


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"tokenizer_hash": "other"}, "another tokenizer"),
        ({"vocab_size": 5}, "knows 5 tokens"),
        ({"steps_version": 0}, "offers no GenerateSteps"),
    ],
)
async def test_start_with_unfit_scorer_fails(info: Any, message: str) -> None:
    scorer = fake_scorer(scripted(), **info)
    with pytest.raises(ConfigError, match=message):
        async with running_gateway(scorer):
            pass


@pytest.mark.usefixtures("quick_probes")
@pytest.mark.parametrize("fits_first", [False, True])
async def test_start_with_fit_and_unfit_scorers_ignores_unfit(
    fits_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither one that turns up nor one that comes back as another model."""
    small = {"max_model_len": 64, "vocab_size": fake_scorer(scripted()).info.vocab_size + 100}
    good = fake_scorer(scripted(), "good", vocab_size=small["vocab_size"] + 100)
    other = fake_scorer(scripted(), "other", **small)
    async with serving(good), serving(other):
        assert other.server is not None
        if not fits_first:
            other.info.tokenizer_hash = "other"
            await other.server.set_serving(False)
        async with running_gateway(good, other) as gateway:
            if fits_first:
                await until_serving(gateway.http, 2)
                assert await limits(gateway) == (small["max_model_len"], small["vocab_size"])
                other.info.tokenizer_hash = "other"
                await other.server.set_serving(False)
                await until(lambda: gateway.metric("gateway_scorers_serving") == 1)
            await other.server.set_serving(True)
            await until(lambda: "does not fit" in caplog.text)
            assert await limits(gateway) == (good.info.max_model_len, good.info.vocab_size)
            assert not other.requests


async def limits(gateway: Running) -> tuple[int, int]:
    """Context length and vocabulary, as the gateway tells them."""
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        (model,) = (await stub.ListModels(generation_pb2.ListModelsRequest())).models
    return model.max_model_len, model.vocab_size


async def test_start_without_scorer_fails_in_time() -> None:
    scorer = fake_scorer(scripted())
    scorer.target = "127.0.0.1:1"
    with pytest.raises(ConfigError, match=r"no scorer served within 0\.3 s at 127"):
        async with running_gateway(scorer, start_timeout_s=0.3):
            pass
