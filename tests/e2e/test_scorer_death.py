"""A scorer killed with SIGKILL mid-stream: the request goes on elsewhere, with the same text."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.support.services.up import Up, addresses, service

pytestmark = pytest.mark.timeout(400)

_PROMPT = "def fibonacci(n):"


async def answer(
    target: str,
    request: generation_pb2.GenerateRequest,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> list[generation_pb2.GenerateResponse]:
    """All of an answer; `on_tokens` hears the number of tokens so far."""
    responses: list[generation_pb2.GenerateResponse] = []
    async with open_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for response in stub.Generate(request, timeout=100):
            responses.append(response)
            on_tokens(sum(len(each.tokens) for each in responses))
    return responses


async def test_scorer_killed_mid_stream_changes_no_text(
    pair: tuple[Path, Path], draft_model_stack: Up
) -> None:
    flags = ("--model", pair[0], "--threads", 1, "--kv-cache-memory", 16)
    other = draft_model_stack.services["scorer_service"]
    with ExitStack() as stack:
        victim = stack.enter_context(service("scorer_service", *flags))
        targets = f"{addresses(victim)['grpc']},{draft_model_stack.scorer}"
        os.kill(other, signal.SIGSTOP)  # so that the gateway begins with the victim
        stack.callback(os.kill, other, signal.SIGCONT)
        gateway = stack.enter_context(service("gateway", "--scorer", targets, "--model", pair[0]))
        grpc = addresses(gateway)["grpc"]
        # What counts the output so far must go on counting.
        request = generation_pb2.GenerateRequest(
            text=_PROMPT,
            sampling=common_pb2.SamplingParams(
                temperature=1.0, seed=5, frequency_penalty=0.2, repetition_penalty=1.1
            ),
            stop=common_pb2.StopParams(max_tokens=200, min_tokens=190),
            top_logprobs=1,
            aux_info=True,
        )
        expected = await answer(grpc, request)

        def kill_midway(num_tokens: int) -> None:
            if num_tokens >= 10:
                os.kill(other, signal.SIGCONT)
                victim.kill()

        resumed = await answer(grpc, request, kill_midway)
        assert victim.wait(10) == -signal.SIGKILL
    wanted, tokens = ([t for r in responses for t in r.tokens] for responses in (expected, resumed))
    assert [token.id for token in tokens] == [token.id for token in wanted]
    assert [token.text for token in tokens] == [token.text for token in wanted]
    assert [token.logprobs.logprob for token in tokens] == pytest.approx(
        [token.logprobs.logprob for token in wanted], abs=1e-3
    )
    assert all(len(token.logprobs.top_token_ids) == 1 for token in tokens)
    last = resumed[-1]
    assert last.finish_reason == expected[-1].finish_reason
    assert last.aux_info.retries == 1
    assert last.aux_info.output_len == last.usage.completion_tokens == len(wanted) >= 190
