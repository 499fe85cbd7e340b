"""Constraints over real RPC: masked, told to proposers, and refused by name."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from outrider import errors
from outrider.engine.sampling.constraint import ConstraintCompiler, ConstraintEditor
from outrider.rpc import status
from outrider.v1 import common_pb2, scorer_pb2
from tests.support.models.byte_tokenizer import EOS, byte_tokenizer
from tests.support.services.scorer import RunningScorer, generate_request, running_scorer
from tests.support.services.scripted_proposer import (
    ScriptedProposer,
    block,
    follow,
    hello,
    proposing,
)

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
PROMPT = [5, 6, 7]
SCHEMA = json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 9})


@asynccontextmanager
async def scorer() -> AsyncIterator[RunningScorer]:
    compiler = ConstraintCompiler(TOKENIZER.to_str(), VOCAB, frozenset({EOS}))
    async with running_scorer(vocab_size=VOCAB, compiler=compiler) as running:
        yield running


def constrained(
    prompt: Sequence[int] = PROMPT, *, temperature: float = 0.0, resumed: int = 0, **kind: object
) -> scorer_pb2.ScorerServiceGenerateRequest:
    request = generate_request(prompt, max_tokens=120, temperature=temperature)
    request.constraint.CopyFrom(common_pb2.Constraint(**kind))  # type: ignore[arg-type]
    request.num_resumed_tokens = resumed
    return request


async def output(
    running: RunningScorer, request: scorer_pb2.ScorerServiceGenerateRequest
) -> tuple[list[int], common_pb2.AuxInfo]:
    token_ids: list[int] = []
    async for response in running.stub.Generate(request, timeout=60):
        token_ids += response.token_ids
    assert response.finish_reason == common_pb2.FINISH_REASON_STOP
    return token_ids, response.aux_info


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_constraint_with_any_draft_keeps_output_in_its_language(temperature: float) -> None:
    request = constrained(temperature=temperature, json_schema=SCHEMA)
    async with scorer() as running:
        alone, _ = await output(running, request)
        value = json.loads(TOKENIZER.decode(alone))
        assert 3 <= len(value) <= 9
        assert all(type(item) is bool for item in value)

        def true(tokens: Sequence[int]) -> list[int]:
            """What comes, and then what the grammar forbids."""
            return [*alone[len(tokens) - len(PROMPT) :][:4], 9, 9]

        proposer = ScriptedProposer(running.stub, follow(true), hello(vocab_size=VOCAB))
        async with proposing(proposer):
            drafted, aux = await output(running, request)
            assert proposer.opens[0].constraint.json_schema == SCHEMA
        assert drafted == alone
        assert 0 < aux.accepted <= aux.drafted

        resumed, _ = await output(
            running,
            constrained(
                [*PROMPT, *alone[:5]], temperature=temperature, resumed=5, json_schema=SCHEMA
            ),
        )
        assert alone[:5] + resumed == alone


async def test_constraint_with_garbage_drafts_is_unharmed() -> None:
    request = constrained(regex="[ab]{12}")
    async with scorer() as running:
        alone, _ = await output(running, request)
        garbage = ScriptedProposer(
            running.stub, lambda s: [block(s, [EOS, 3, 3])], hello(vocab_size=VOCAB)
        )
        async with proposing(garbage):
            drafted, aux = await output(running, request)
        assert drafted == alone
        assert aux.drafted == 0


@pytest.mark.parametrize(
    ("param", "source", "message"),
    [
        ("json_schema", '{"type": "strin"}', "Invalid type"),
        ("json_schema", "{", "EOF"),
        ("regex", "a(?!b)", "look-ahead"),
        ("grammar", "start: nothing", "unknown name"),
        ("grammar", "x" * 2**19, "at most"),
    ],
)
async def test_constraint_that_cannot_be_compiled_is_refused(
    param: str, source: str, message: str
) -> None:
    async with scorer() as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await output(running, constrained(**{param: source}))
        error = status.from_rpc_error(caught.value)
        assert isinstance(error, errors.InvalidRequestError)
        assert error.param == param
        assert message in error.message
        assert (await running.info()).running_requests == 0


async def test_constraint_compiled_while_draining_is_sent_elsewhere() -> None:
    began, go_on = threading.Event(), threading.Event()

    class Slow(ConstraintCompiler):
        def editor(self, *args: Any) -> ConstraintEditor:
            began.set()
            assert go_on.wait(10)
            return super().editor(*args)

    compiler = Slow(TOKENIZER.to_str(), VOCAB, frozenset({EOS}))
    async with running_scorer(vocab_size=VOCAB, compiler=compiler) as running:
        asked = asyncio.create_task(output(running, constrained(regex="[ab]{12}")))
        assert await asyncio.to_thread(began.wait, 10)
        await running.servicer.drain(10)
        go_on.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked
        assert isinstance(status.from_rpc_error(caught.value), errors.UnavailableError)


async def test_constraint_on_model_without_tokenizer_is_refused() -> None:
    async with running_scorer() as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await output(running, constrained(json_object=True))
        error = status.from_rpc_error(caught.value)
        assert isinstance(error, errors.InvalidRequestError)
        assert error.param == "json_object"
        assert "tokenizer.json" in error.message


async def test_constraint_without_a_possible_next_token_is_an_error() -> None:
    request = constrained(grammar='start: "a" x\nx: x "b"')
    async with scorer() as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await output(running, request)
        error = status.from_rpc_error(caught.value)
        assert isinstance(error, errors.InvalidRequestError)
        assert error.param == "grammar"
        again, _ = await output(running, constrained(regex="ok"))
        assert TOKENIZER.decode(again) == "ok"
