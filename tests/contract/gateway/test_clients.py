"""What real HTTP clients send beside bodies, and read beside answers."""

from __future__ import annotations

import gzip
import json

import httpx

from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import MAX_MODEL_LEN, running_gateway, tokens

TEXT = "hello 🎉 world"
BODY = json.dumps({"prompt": "def f("}).encode()
STREAM = {
    "prompt": "def f(",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


async def test_gateway_with_requests_of_real_clients_answers_as_they_expect() -> None:
    async with (
        running_gateway(
            Script(tokens(TEXT)), served_model_name="a/b", served_model_aliases=("c",)
        ) as running,
        httpx.AsyncClient(base_url=running.http) as client,
    ):
        named = await client.post("/v1/completions", content=BODY, headers={"X-Request-Id": "r1"})
        assert (named.status_code, named.headers["x-request-id"]) == (200, "r1")
        assert running.scorer.requests[-1].request_id == "r1"
        sent = running.scorer.requests[-1]
        assert sent.stop.max_tokens == MAX_MODEL_LEN - len(sent.prompt_token_ids)
        unknown = await client.get("/v1/nothing", headers={"X-Request-Id": "x" * 999})
        assert len(unknown.headers["x-request-id"]) == 32

        listed = [card["id"] for card in (await client.get("/v1/models/")).json()["data"]]
        assert listed == ["a/b", "c"]
        for asked, answered in (("c", "c"), ("a/b", "a/b"), ("default", "a/b")):
            answer = await client.post("/v1/completions", json={"model": asked, "prompt": "x"})
            assert answer.json()["model"] == answered

        done = len(running.scorer.requests)
        refused = [
            await client.post("/v1/completions", content=content, headers=headers)
            for content, headers in (
                (gzip.compress(BODY), {"content-type": "application/json"} | GZIP),
                (BODY, {"content-type": "text/plain"}),
                (BODY, {"content-type": "application/x-www-form-urlencoded"}),
                (BODY, {"origin": "https://evil.example.com"}),
            )
        ]
        assert [answer.status_code for answer in refused] == [415] * 4
        assert all("application/json" in a.json()["error"]["message"] for a in refused[1:])
        assert len(running.scorer.requests) == done

        too_long = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 9999})
        limit = f"This model's maximum context length is {MAX_MODEL_LEN} tokens"
        assert too_long.json()["error"]["message"].startswith(limit)


GZIP = {"content-encoding": "gzip"}


async def test_stream_with_continuous_usage_counts_up_to_the_last_event() -> None:
    async with (
        running_gateway(Script(tokens(TEXT))) as running,
        httpx.AsyncClient(base_url=running.http) as client,
    ):
        answer = await client.post("/v1/completions", json=STREAM | {"aux_info": True})
    events = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(tokens(TEXT))
    assert {event["usage"]["prompt_tokens"] for event in events} == {len(tokens("def f(")) + 1}
    aux_info, speculation = (
        events[-1]["aux_info"],
        events[-1]["metrics"]["speculative_decoding"],
    )
    if aux_info["drafted"]:
        assert speculation["num_accepted_draft_tokens"] == aux_info["accepted"]
        assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
    else:
        assert speculation is None
