"""What requests can ask for beyond text, over a fake scorer: choices, logprobs, formats, advice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from starlette.responses import Response

from gateway.openai import answer as answers
from gateway.openai import job
from gateway.openai.choices import Completion
from gateway.openai.rendering import Rendering
from outrider.errors import InvalidRequestError
from outrider.v1 import common_pb2, scorer_pb2
from tests.support.services.fake_scorer import Script, logprobs_of
from tests.support.services.gateway import Running, fake_scorer, running_gateway, tokenizer, tokens
from tests.support.waiting import until

TEXT = "hello 🎉 world, naïve café 日本語"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with running_gateway(Script(tokens(TEXT))) as running:
        yield running


def by_seed(request: scorer_pb2.ScorerServiceGenerateRequest) -> list[int]:
    """Another completion for each seed."""
    return tokens(f"seed {request.sampling.seed} says hello")


async def complete(gateway: Running, **parameters: Any) -> Any:
    return await gateway.client.completions.create(
        **{"model": "default", "prompt": "x", **parameters}
    )


# Choices


async def test_choices_with_n_have_own_seeds_and_first_has_the_requests() -> None:
    async with running_gateway(Script(by_seed)) as gateway:
        one = await complete(gateway, seed=5)
        three = await complete(gateway, seed=5, n=3, prompt=["x", "hello world"])
        stream = await complete(gateway, seed=5, n=3, stream=True)
        texts = ["", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        sent = gateway.scorer.requests
    assert [choice.index for choice in three.choices] == list(range(6))
    assert three.choices[0].text == three.choices[3].text == one.choices[0].text
    assert len({choice.text for choice in three.choices}) == 3
    assert texts == [choice.text for choice in three.choices[:3]]
    assert {request.sampling.seed for request in sent[1:7]} == {
        5,
        (5 + 0x9E3779B97F4A7C15) % 2**64,
        (5 + 2 * 0x9E3779B97F4A7C15) % 2**64,
    }
    assert len({request.request_id for request in sent}) == len(sent)
    lengths = [len(tokens(choice.text)) for choice in three.choices]
    assert three.usage.completion_tokens == sum(lengths)
    assert three.usage.prompt_tokens == one.usage.prompt_tokens + 1 + len(tokens("hello world"))
    assert three.usage.prompt_tokens_details.cached_tokens == 2


async def test_chat_with_n_streams_choices_side_by_side() -> None:
    async with running_gateway(Script(by_seed)) as gateway:
        stream = await gateway.client.chat.completions.create(
            **{"model": "default", "messages": MESSAGES, "seed": 5, "n": 2, "stream": True},
            stream_options={"include_usage": True},
        )
        roles, texts, usage = ["", ""], ["", ""], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                roles[choice.index] += choice.delta.role or ""
                texts[choice.index] += choice.delta.content or ""
        whole = await gateway.client.chat.completions.create(
            model="default", messages=MESSAGES, seed=5, n=2
        )
    assert roles == ["assistant"] * 2
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage is not None
    assert usage == whole.usage


async def test_choices_of_a_prompt_start_after_the_first() -> None:
    async with running_gateway(Script(tokens(TEXT), together=2)) as gateway:
        answer = await complete(gateway, prompt=["one", "two"], n=3)
        prompts = [tuple(request.prompt_token_ids) for request in gateway.scorer.requests]
    assert [choice.text for choice in answer.choices] == [TEXT] * 6
    assert len(set(prompts[:2])) == 2  # none was answered before these two had come
    assert sorted(prompts) == sorted(prompts[:2] * 3)


async def test_best_of_above_n_returns_likeliest_and_counts_all() -> None:
    async with running_gateway(Script(by_seed)) as gateway:
        answer = await complete(gateway, seed=5, n=2, best_of=4, extra_body={"aux_info": True})
        sent = gateway.scorer.requests
        every = {
            text: [logprobs_of(token, 0).logprob for token in tokens(text)]
            for text in (tokenizer().decode(by_seed(request)) for request in sent)
        }
    assert len(every) == 4
    ranked = sorted(every, key=lambda text: sum(every[text]) / len(every[text]), reverse=True)
    assert [choice.text for choice in answer.choices] == ranked[:2]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage.completion_tokens == sum(map(len, every.values()))
    assert len(answer.aux_info) == 2
    assert {request.top_logprobs for request in sent} == {0}


# Logprobs


async def chat_entries(gateway: Running, stream: bool, **parameters: Any) -> list[Any]:
    answer: Any = await gateway.client.chat.completions.create(
        model="default", messages=MESSAGES, logprobs=True, stream=stream, **parameters
    )
    if not stream:
        return list(answer.choices[0].logprobs.content)
    found: list[Any] = []
    async for chunk in answer:
        choice = chunk.choices[0]
        if choice.logprobs is not None:
            found += choice.logprobs.content
        else:  # a text never comes without
            assert not choice.delta.content
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_with_logprobs_returns_entry_per_token(gateway: Running, stream: bool) -> None:
    entries = await chat_entries(gateway, stream, top_logprobs=2)
    ids = tokens(TEXT)
    assert [entry.logprob for entry in entries] == [logprobs_of(token, 0).logprob for token in ids]
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == TEXT
    assert any(entry.token.startswith("bytes:\\x") for entry in entries)
    for entry in entries:
        assert entry.token == bytes(entry.bytes).decode(errors="replace") or entry.token[0] == "b"
        assert [top.logprob for top in entry.top_logprobs] == [-1 / 16, -2 / 16]
        assert [bytes(top.bytes) for top in entry.top_logprobs] == [
            tokenizer().token_bytes(token) for token in (2, 3)
        ]
    assert gateway.scorer.requests[-1].top_logprobs == 2


async def test_chat_logprobs_without_top_logprobs_has_no_alternatives(gateway: Running) -> None:
    entries = await chat_entries(gateway, stream=False)
    assert all(entry.top_logprobs == [] for entry in entries)
    assert gateway.scorer.requests[-1].HasField("top_logprobs")
    assert gateway.scorer.requests[-1].top_logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_with_logprobs_returns_aligned_columns(
    gateway: Running, stream: bool
) -> None:
    answer = await complete(gateway, logprobs=2, stream=stream)
    pieces = [chunk.choices[0] async for chunk in answer] if stream else [answer.choices[0]]
    shaped = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    ids = tokens(TEXT)
    assert [value for one in shaped for value in one.token_logprobs] == [
        logprobs_of(token, 0).logprob for token in ids
    ]
    names = [name for one in shaped for name in one.tokens]
    assert len(names) == len(ids)
    offsets = [offset for one in shaped for offset in one.text_offset]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for name, offset in zip(names, offsets, strict=True):
        assert name.startswith("bytes:") or TEXT[offset:].startswith(name)
    for name, top in zip(names, (top for one in shaped for top in one.top_logprobs), strict=True):
        assert name in top
        assert 2 <= len(top) <= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_with_stop_string_end_with_text(stream: bool) -> None:
    async with running_gateway(Script(tokens("hello world STOP and more"))) as gateway:
        entries = await chat_entries(gateway, stream, stop=" world STOP")
        plain = await gateway.client.chat.completions.create(
            model="default", messages=MESSAGES, stop=" world STOP"
        )
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "hello"
    assert plain.usage is not None
    assert plain.usage.completion_tokens == len(entries)


async def test_logprobs_when_another_scorer_continues_stay_aligned() -> None:
    def dying() -> Script:  # whichever is asked first
        return Script(tokens(TEXT), prompt_len=3, die_after=5, delay_s=0.05)

    scorers = [fake_scorer(dying(), name) for name in ("a", "b")]
    async with running_gateway(*scorers) as gateway:
        task = asyncio.create_task(complete(gateway, prompt=[5, 6, 7], logprobs=0))
        await until(lambda: any(scorer.requests for scorer in scorers))
        next(s for s in scorers if not s.requests).script.die_after = None
        answer = await task
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].logprobs.token_logprobs == [
        logprobs_of(token, 0).logprob for token in tokens(TEXT)
    ]
    resumed = [request.num_resumed_tokens for s in scorers for request in s.requests]
    assert sorted(resumed) == [0, 5]


async def test_more_logprobs_of_prompts_than_an_answer_holds_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3 and 1 tokens with 2 alternatives each, for 2 choices."""
    monkeypatch.setattr(job, "MAX_ANSWER_LOGPROBS", 4 * 3 * 2)
    asked: Any = {"n": 2, "extra_body": {"prompt_logprobs": 2}}
    async with running_gateway(Script(tokens(TEXT), scores_prompts=True)) as gateway:
        answer = await complete(gateway, prompt=[[1, 2, 3], [4]], **asked)
        told = [choice.prompt_logprobs for choice in answer.choices]
        assert [len(each) for each in told] == [3, 3, 1, 1]
        for wrong in ({"prompt": [[1, 2, 3], [4, 5]]}, {"prompt": [[1, 2, 3], [4]], "n": 3}):
            with pytest.raises(openai.BadRequestError, match="prompt must be split") as refused:
                await complete(gateway, **{**asked, **wrong})
            assert refused.value.param == "prompt"
        echoed: Any = {"echo": True, "logprobs": 6, "prompt": [[1, 2, 3], [4]]}
        with pytest.raises(openai.BadRequestError, match="prompt must be split"):
            await complete(gateway, **echoed)
        assert len(gateway.scorer.requests) == 4


async def test_logprobs_missing_from_scorer_fail_the_request() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        scorer = gateway.scorer
        original = scorer._rounds

        async def without(request: Any) -> AsyncIterator[Any]:
            request.ClearField("top_logprobs")
            async for response in original(request):
                yield response

        scorer._rounds = without  # type: ignore[method-assign]
        with pytest.raises(Exception, match="logprobs"):
            await complete(gateway, logprobs=1)


# Echo


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_with_echo_returns_prompt_first(gateway: Running, stream: bool) -> None:
    for prompt, shown in (("def f(", "def f("), (tokens("hello"), "hello")):
        answer = await complete(gateway, prompt=prompt, echo=True, stream=stream)
        if stream:
            text = "".join([chunk.choices[0].text async for chunk in answer])
        else:
            text = answer.choices[0].text
            assert answer.usage.completion_tokens == len(tokens(TEXT))
        assert text == shown + TEXT
    several = await complete(gateway, prompt=["one", "two"], echo=True, n=2)
    assert [c.text for c in several.choices] == [p + TEXT for p in ("one", "one", "two", "two")]


# Output formats


@pytest.mark.parametrize(
    ("change", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
                }
            },
            "json_schema",
            '{"type": "object"}',
        ),
        ({"structured_outputs": {"json": {"type": "array"}}}, "json_schema", '{"type": "array"}'),
        ({"structured_outputs": {"json": '{"type":"array"}'}}, "json_schema", '{"type":"array"}'),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"choice": ["a.b", "c|d", "é"]}}, "regex", r"a\.b|c\|d|é"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    ],
)
async def test_output_format_when_given_becomes_constraint(
    gateway: Running, change: Any, kind: str, source: Any
) -> None:
    await complete(gateway, extra_body=change)
    await gateway.client.chat.completions.create(
        model="default", messages=MESSAGES, extra_body=change
    )
    for sent in gateway.scorer.requests:
        assert sent.constraint.WhichOneof("kind") == kind
        assert getattr(sent.constraint, kind) == source


async def test_output_format_refused_by_scorer_has_the_clients_name() -> None:
    refusal = InvalidRequestError("json_schema cannot be used: why.", param="json_schema")
    async with running_gateway(Script(tokens(TEXT), refuse=refusal)) as gateway:
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(gateway, extra_body={"structured_outputs": {"json": {}}})
    assert caught.value.param == "structured_outputs.json"
    assert "structured_outputs.json cannot be used: why." in caught.value.message


async def test_output_format_without_a_possible_next_token_is_an_error() -> None:
    stuck = InvalidRequestError("grammar leads to a place.", param="grammar")
    grammar: Any = {"extra_body": {"structured_outputs": {"grammar": 'start: "h" x\nx: x "e"'}}}
    async with running_gateway(Script(tokens(TEXT), refuse=stuck, die_after=4)) as gateway:
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(gateway, **grammar)
        stream = await complete(gateway, stream=True, **grammar)
        choices: list[Any] = []
        with pytest.raises(openai.APIError, match=r"structured_outputs\.grammar leads") as event:  # noqa: PT012
            async for chunk in stream:
                choices += chunk.choices
    assert caught.value.param == event.value.param == "structured_outputs.grammar"
    assert TEXT.startswith("".join(choice.text for choice in choices))
    assert not any(choice.finish_reason for choice in choices)


# Speculation


@pytest.mark.parametrize(
    ("verification", "rule", "settings"),
    [
        ("rejection", common_pb2.VERIFICATION_RULE_REJECTION, {}),
        ({"rule": "typical", "epsilon": 0.5, "alpha": 0.25}, 3, {"epsilon": 0.5, "alpha": 0.25}),
        (
            {"rule": "top_p_window", "max_candidate_len": 3, "verify_window": 1},
            *(4, {"max_candidate_len": 3, "verify_window": 1}),
        ),
    ],
)
async def test_speculation_with_verification_and_methods_reaches_scorer(
    gateway: Running, verification: Any, rule: int, settings: Any
) -> None:
    speculation = {"methods": ["suffix", "draft_model"], "verification": verification}
    await complete(gateway, extra_body={"speculation": speculation})
    sent = gateway.scorer.requests[-1].speculation
    assert list(sent.methods) == ["suffix", "draft_model"]
    assert sent.verification.rule == rule
    for name, value in settings.items():
        assert getattr(sent.verification, name) == value


async def test_prediction_when_given_becomes_advice_and_is_counted() -> None:
    async with running_gateway(Script(tokens(TEXT), method="deterministic")) as gateway:
        contents: list[Any] = [
            TEXT,
            [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}],
        ]
        for content in contents:
            answer = await gateway.client.chat.completions.create(
                **{"model": "default", "messages": MESSAGES},
                prediction={"type": "content", "content": content},
                extra_body={"aux_info": True},
            )
            sent = gateway.scorer.requests[-1].speculation
            assert list(sent.advice.token_ids) == tokens(TEXT)
            assert sent.advice.edit
            assert not sent.methods
            assert answer.usage is not None
            details = answer.usage.completion_tokens_details
            assert details is not None
            accepted = answer.model_dump()["aux_info"]["accepted"]
            assert details.accepted_prediction_tokens == accepted > 0
            assert details.rejected_prediction_tokens == 0


async def test_prediction_behind_stop_string_is_not_accepted() -> None:
    script = Script(tokens("hello world STOP and more"), per_round=6, method="deterministic")
    async with running_gateway(script) as gateway:
        answer = await complete(
            gateway,
            stop="world STOP",
            extra_body={"prediction": {"type": "content", "content": "hello"}, "aux_info": True},
        )
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == answer.aux_info["accepted"]
    assert details.accepted_prediction_tokens <= answer.usage.completion_tokens
    assert details.rejected_prediction_tokens > 0


async def test_usage_without_prediction_has_no_details(gateway: Running) -> None:
    answer = await complete(gateway)
    assert answer.usage.completion_tokens_details is None


async def test_advice_under_rtp_llm_names_reaches_scorer(gateway: Running) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"sp_advice_prompt": "hello"}, {"token_ids": tokens("hello"), "edit": False}),
        ({"sp_advice_prompt_token_ids": [5, 6], "sp_edit": 1}, {"token_ids": [5, 6], "edit": True}),
        (
            {"sp_advice_prompt": "hello", "sp_edit": 0, "sp_min_token_match": 3},
            {"edit": False, "min_token_match": 3, "max_token_match": 3},
        ),
        (
            {"sp_advice_prompt": "hello", "sp_max_token_match": 8},
            {"min_token_match": 2, "max_token_match": 8},
        ),
    ]
    for extra_config, wanted in cases:
        await complete(gateway, extra_body={"extra_config": extra_config})
        advice = gateway.scorer.requests[-1].speculation.advice
        assert {name: _plain(getattr(advice, name)) for name in wanted} == wanted


async def test_references_when_given_reach_scorer(gateway: Running) -> None:
    await complete(gateway, extra_body={"speculation": {"references": ["hello", [5, 6], ""]}})
    references = gateway.scorer.requests[-1].speculation.advice.references
    assert [list(one.token_ids) for one in references] == [tokens("hello"), [5, 6], []]


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int)) else list(value)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_stream_with_draft_trees_tells_each_rounds_draft_by_its_place(path: str) -> None:
    said = tokens("hello world, hello world")
    body: dict[str, Any] = {"stream": True, "token_kinds": True, "draft_trees": True}
    body |= (
        {"prompt": "x"}
        if path == "completions"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    async with running_gateway(Script(said)) as gateway, httpx.AsyncClient() as client:
        response = await client.post(f"{gateway.http}/v1/{path}", json=body)
        plain = await client.post(f"{gateway.http}/v1/{path}", json=body | {"draft_trees": False})
        whole = await client.post(f"{gateway.http}/v1/{path}", json=body | {"stream": False})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    choices = [json.loads(line)["choices"] for line in lines[:-1]]
    drafts = [draft for (choice,) in choices if choice for draft in choice.get("drafts", [])]
    assert [draft["position"] for draft in drafts] == [*range(0, len(said), 2)]
    assert [draft["tokens"][0]["id"] for draft in drafts] == said[::2]
    assert drafts[0]["tokens"][0]["text"] == tokenizer().decode([said[0]])
    assert {tuple(draft["parents"]) for draft in drafts} == {(-1, -1)}
    assert "drafts" not in plain.text
    assert whole.status_code == 400
    assert whole.json()["error"]["param"] == "draft_trees"


@pytest.mark.parametrize(
    ("path", "asked", "scores"),
    [
        (
            *("chat/completions", {"messages": MESSAGES}),
            {"logprobs": True, "top_logprobs": 20},
        ),
        ("completions", {"prompt": "x"}, {"logprobs": 20}),
    ],
)
async def test_large_answer_is_made_off_the_event_loop(
    path: str, asked: dict[str, Any], scores: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    make = answers._whole

    def whole(rendering: Rendering, completions: Sequence[Completion], *, large: bool) -> Response:
        made.append((sum(len(each.tokens) for each in completions), threading.get_ident()))
        return make(rendering, completions, large=large)

    monkeypatch.setattr(answers, "_whole", whole)
    async with running_gateway(Script(tokens("hello world" * 40))) as gateway:
        for body in ({}, {"n": 4, **scores}):
            async with httpx.AsyncClient(base_url=gateway.http) as client:
                told = await client.post(f"/v1/{path}", json={**asked, **body})
            assert told.status_code == 200
            assert all(each["finish_reason"] == "stop" for each in told.json()["choices"])
    (few, here), (many, thread) = made
    assert (here, many) == (threading.get_ident(), 4 * few)
    assert thread != here
