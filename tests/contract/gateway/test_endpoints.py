"""The paths beside completions and chats: tokens, the server itself, and what is not served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider import __version__
from outrider.models.tokenizer import Tokenizer
from outrider.rpc.channel import open_channel
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.support.models.tokenizers import byte_level_bpe, save
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import (
    MAX_MODEL_LEN,
    fake_scorer,
    running_gateway,
    tokenizer,
    tokenizers_that_hang,
    tokens,
)

TEXT = "hello é日 world </s>"
MESSAGES: Any = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "é"}]


async def test_tokenize_has_the_tokens_that_a_completion_has() -> None:
    async with (
        running_gateway(Script(tokens("x")), served_model_name="a") as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        for body in (
            {"prompt": TEXT},
            {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}, "add_special_tokens": False},
        ):
            answer = (await client.post("/tokenize", json={"model": "a", **body})).json()
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            used = (await client.post(path, json=body)).json()["usage"]["prompt_tokens"]
            assert answer["tokens"] == list(gateway.scorer.requests[-1].prompt_token_ids)
            assert answer["count"] == used == len(answer["tokens"])
            assert (answer["max_model_len"], answer["token_strs"]) == (MAX_MODEL_LEN, None)
        for prompt, plain in ((TEXT, tokens(TEXT)), ("", [])):
            bare = {"prompt": prompt, "add_special_tokens": False, "return_token_strs": True}
            answer = (await client.post("/tokenize", json=bare)).json()
            assert answer["tokens"] == plain
            assert answer["token_strs"] == [tokenizer().spell(each) for each in plain]
        assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == [0]


async def test_detokenize_spells_what_tokenize_read() -> None:
    async with (
        running_gateway(Script(tokens("x"))) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        read = (await client.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]
        spelled = await client.post("/detokenize", json={"model": "default", "tokens": read})
        assert spelled.json() == {"prompt": f"<s>{TEXT}"}
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
        facts = (await client.get("/tokenizer_info")).json()
        assert (facts["bos_token"], facts["eos_token"]) == ("<s>", "</s>")
        assert "messages" in facts["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", [], 400, None),
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "b"}, 404, "model"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, 400, None),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x" * 10**6}, 400, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1], "model": "b"}, 404, "model"),
        ("/detokenize", {"prompt": "a"}, 400, "tokens"),
    ],
)
async def test_tokenize_with_bad_input_names_the_field(
    path: str, body: Any, status: int, param: str | None
) -> None:
    async with (
        running_gateway(Script(tokens("x"))) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        answer = await client.post(path, json=body)
    assert answer.status_code == status
    assert param is None or answer.json()["error"]["param"] == param


async def test_tokenize_takes_a_place_and_needs_a_key(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-1\n")
    async with (
        running_gateway(
            Script(tokens("x")), api_key_file=str(keys), api_key="secret-1", request_timeout_s=1.0
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        for path in ("/tokenize", "/detokenize"):
            assert (await client.post(path, json={"prompt": "a"})).status_code == 401
        assert (await client.get("/tokenizer_info")).status_code == 401
        with tokenizers_that_hang():
            key = {"authorization": "Bearer secret-1"}
            slow = await client.post("/tokenize", json={"prompt": "a"}, headers=key)
            assert slow.status_code == 504
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_server_tells_its_version_load_and_health() -> None:
    async with (
        running_gateway(Script(tokens("hello world"), delay_s=0.05)) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        assert (await client.get("/version")).json() == {"version": __version__}
        for method in ("GET", "POST", "HEAD"):
            assert (await client.request(method, "/ping")).status_code == 200
        body = {"prompt": "a", "n": 2, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            async for _ in stream.aiter_lines():
                load = (await client.get("/load")).json()
                break
        assert load == {"server_load": 2}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/embeddings", "embeddings"),
        ("/rerank", "scores of texts"),
        ("/v2/rerank", "scores of texts"),
        ("/score", "scores of texts"),
        ("/v1/moderations", "scores of texts"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v1/images/generations", "images"),
    ],
)
async def test_other_kinds_of_models_are_refused_with_what_is_served(path: str, kind: str) -> None:
    async with (
        running_gateway(Script(tokens("x"))) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        error = (await client.post(path, json={"input": "a"})).json()["error"]
    assert error["code"] == "not_served"
    assert f"not {kind}" in error["message"]
    assert "Served: /v1/chat/completions, /v1/completions, " in error["message"]
    assert error["message"].count("/v1/models") == 1


async def test_adapter_is_refused_by_name_as_model_and_as_field() -> None:
    async with (
        running_gateway(Script(tokens("x"))) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        for body, status, says in (
            ({"model": "my-lora"}, 404, "--engine vllm -- --enable-lora --lora-modules NAME=PATH"),
            ({"lora_request": {"name": "a"}}, 400, "name the adapter as the model"),
        ):
            answer = await client.post("/v1/completions", json={"prompt": "a", **body})
            assert answer.status_code == status
            assert says in answer.json()["error"]["message"]


async def test_suffix_asks_for_the_middle_and_stops_at_the_models_tokens(tmp_path: Path) -> None:
    made = byte_level_bpe()
    made.add_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"])
    folder = save(made, tmp_path)
    coder = Tokenizer.load(folder)
    fake = fake_scorer(Script(tokens("x")), vocab_size=coder.vocab_size, tokenizer_hash=coder.hash)
    async with running_gateway(fake, model=str(folder)) as gateway:
        body: Any = {"model": "default", "prompt": ["def f(", ""], "suffix": "):\n"}
        answer = await gateway.client.completions.create(**body, echo=True)
        assert [choice.text for choice in answer.choices] == ["def f(x", "x"]
        asked = sorted([list(each.prompt_token_ids) for each in gateway.scorer.requests], key=len)
        layouts = [f"<fim_prefix>{prefix}<fim_suffix>):\n<fim_middle>" for prefix in ("", "def f(")]
        assert asked == [*map(coder.encode, layouts)]
        async with httpx.AsyncClient(base_url=gateway.http) as client:
            read = await client.post("/tokenize", json={"prompt": "def f(", "suffix": "):\n"})
        assert read.json()["tokens"] == asked[1]
        stop = gateway.scorer.requests[0].stop
        assert list(stop.stop_token_ids) == [coder.token_id("<|endoftext|>")]
        async with open_channel(gateway.grpc) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(generation_pb2.GenerateRequest(text="def f(", suffix="):\n"))
            assert "".join([response.text async for response in call]) == "x"
        assert list(gateway.scorer.requests[-1].prompt_token_ids) == asked[1]
        assert gateway.scorer.requests[-1].stop.stop_token_ids == stop.stop_token_ids
        await gateway.client.completions.create(**body, extra_body={"ignore_eos": True})
        assert not gateway.scorer.requests[-1].stop.stop_token_ids
        for wrong in ({"prompt": [1, 2]}, {"logprobs": 1, "echo": True}):
            with pytest.raises(openai.BadRequestError):
                await gateway.client.completions.create(**body | wrong)


async def test_suffix_is_refused_where_the_tokenizer_has_no_tokens_for_it() -> None:
    async with running_gateway(Script(tokens("x"))) as gateway:
        with pytest.raises(openai.BadRequestError) as caught:
            await gateway.client.completions.create(model="default", prompt="a", suffix="b")
        assert caught.value.param == "suffix"
        plain = await gateway.client.completions.create(model="default", prompt="a", suffix="")
        assert plain.choices[0].text == "x"
