"""A scorer over vLLM beside a native one: the same contract, the same greedy text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import Tokenizer
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, scorer_pb2, scorer_pb2_grpc
from tests.support.services.up import EVERY_ROUND, Up, addresses, service
from tests.support.services.up import running as running_stack

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

LIMITS = ("--model", "embedded", "--max-num-seqs", 8, "--max-model-len", 512)
SMALL = (*LIMITS, "--kv-cache-memory", 64)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
GREEDY = common_pb2.SamplingParams(temperature=0.0)
ENDLESS = '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'
TEXTS = ("def fibonacci(n):\n", "class Stack:\n    def push(self, item):\n", "import os\n")
Request = scorer_pb2.ScorerServiceGenerateRequest
Response = scorer_pb2.ScorerServiceGenerateResponse


@contextmanager
def vllm_scorer(*flags: object, speculative: dict[str, Any] | None = None) -> Iterator[Any]:
    own: tuple[str, ...] = ("--enforce-eager", "--max-num-batched-tokens", "64")
    if speculative is not None:
        own = (*own, "--speculative-config", json.dumps(speculative))
    k = () if speculative else ("--num-speculative-tokens", 0)
    argv = ("scorer_service", "--engine", "vllm", *SMALL, *k, *flags, "--", *own)
    with service(*argv) as process:
        try:
            yield process
        finally:
            if process.poll() is None:  # vLLM's processes end with it only if it may say so
                process.terminate()
                process.wait(30)


@pytest.fixture(scope="module")
def native_process() -> Iterator[subprocess.Popen[str]]:
    with service("scorer_service", *SMALL, "--threads", 1, "--engine", "native") as process:
        yield process


@pytest.fixture(scope="module")
def native(native_process: subprocess.Popen[str]) -> str:
    return addresses(native_process)["grpc"]


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    with vllm_scorer() as process:
        yield process


@pytest.fixture(scope="module")
def vllm(process: subprocess.Popen[str]) -> dict[str, str]:
    return addresses(process)


@pytest.fixture(scope="module")
def served() -> Iterator[Up]:
    """`outrider serve` with vLLM and a draft model beside it."""
    flags = ("--engine", "vllm", *SMALL[2:], *EVERY_ROUND, "--", "--enforce-eager")
    with running_stack(*flags) as up:
        yield up


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("embedded", "target"))


async def generate(
    address: str,
    prompt: list[int],
    on_tokens: Callable[[int], None] = lambda _: None,
    **fields: Any,
) -> list[Response]:
    sampling = fields.pop("sampling", GREEDY)
    stop = fields.pop("stop", common_pb2.StopParams(max_tokens=40))
    request = Request(prompt_token_ids=prompt, sampling=sampling, stop=stop, **fields)
    responses: list[Response] = []
    async with open_channel(address) as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        async for response in stub.Generate(request, timeout=100):
            responses.append(response)
            on_tokens(len(tokens_of(responses)))
    return responses


async def running(address: str) -> int:
    async with open_channel(address) as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        info = await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=10)
    return int(info.running_requests)


def tokens_of(responses: list[Response]) -> list[int]:
    return [token for response in responses for token in response.token_ids]


@pytest.mark.parametrize("text", TEXTS)
async def test_greedy_text_equals_the_native_engines_and_streams_by_step(
    vllm: dict[str, str], native: str, tokenizer: Tokenizer, text: str
) -> None:
    prompt = tokenizer.encode(text)
    ours = await generate(native, prompt, top_logprobs=2)
    theirs = await generate(vllm["grpc"], prompt, top_logprobs=2)
    assert tokens_of(theirs) == tokens_of(ours)
    assert theirs[-1].finish_reason == ours[-1].finish_reason
    assert theirs[-1].stop_token_id == ours[-1].stop_token_id
    assert len(theirs) >= len(tokens_of(theirs)) // 2
    for told, known in zip(logprobs(theirs), logprobs(ours), strict=True):
        assert told.logprob == pytest.approx(known.logprob, abs=1e-3)
        assert list(told.top_token_ids) == list(known.top_token_ids)
    account = theirs[-1].aux_info
    assert (account.verification, account.exact) == ("coupled", True)
    assert account.output_len == theirs[-1].usage.completion_tokens == len(tokens_of(theirs))
    assert account.prefill_ms > 0


async def test_prompts_logprobs_are_the_native_engines(
    vllm: dict[str, str], native: str, tokenizer: Tokenizer
) -> None:
    """Also of a prompt whose keys and values are in the prefix cache."""
    prompt = tokenizer.encode(TEXTS[0] * 12)
    for _ in range(2):
        ours = (await generate(native, prompt, prompt_logprobs=2))[0].prompt_logprobs
        theirs = (await generate(vllm["grpc"], prompt, prompt_logprobs=2))[0].prompt_logprobs
        assert len(theirs.logprobs) == len(prompt) - 1
        assert list(theirs.logprobs) == pytest.approx(list(ours.logprobs), abs=1e-3)
        assert list(theirs.top_logprobs) == pytest.approx(list(ours.top_logprobs), abs=1e-3)


def logprobs(responses: list[Response]) -> list[common_pb2.TokenLogprobs]:
    return [each for response in responses for each in response.logprobs]


async def test_seeded_text_behind_a_prompt_in_parts_repeats(
    vllm: dict[str, str], tokenizer: Tokenizer
) -> None:
    """On a CPU vLLM cannot take back what it draws behind a part."""
    prompt = tokenizer.encode(TEXTS[0] * 20)
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=5)
    first, again = [await generate(vllm["grpc"], prompt, sampling=sampling) for _ in range(2)]
    short = await generate(vllm["grpc"], prompt[-40:], sampling=sampling)
    assert tokens_of(first) == tokens_of(again) != tokens_of(short)


async def test_stop_token_ends_the_text_but_not_before_min_tokens(
    vllm: dict[str, str], tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(TEXTS[0])
    free = tokens_of(await generate(vllm["grpc"], prompt))
    stop = common_pb2.StopParams(max_tokens=40, stop_token_ids=[free[4]])
    ended = await generate(vllm["grpc"], prompt, stop=stop)
    assert tokens_of(ended) == free[: free.index(free[4])]
    assert (ended[-1].stop_token_id, ended[-1].finish_reason) == (free[4], 1)
    stop.min_tokens = 12
    longer = await generate(vllm["grpc"], prompt, stop=stop)
    assert len(tokens_of(longer)) >= 12


async def test_edits_of_logits_and_constraints_hold(
    vllm: dict[str, str], tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(TEXTS[0])
    free = tokens_of(await generate(vllm["grpc"], prompt))
    bias = [common_pb2.LogitBias(token_id=free[0], bias=-100.0)]
    sampling = common_pb2.SamplingParams(temperature=0.0, logit_bias=bias)
    assert tokens_of(await generate(vllm["grpc"], prompt, sampling=sampling))[0] != free[0]
    constraint = common_pb2.Constraint(regex="[0-9]{4}-[0-9]{2}")
    dated = await generate(vllm["grpc"], prompt, constraint=constraint)
    text = b"".join(map(tokenizer.token_bytes, tokens_of(dated))).decode()
    assert len(text) == 7
    assert text[4] == "-"
    assert dated[-1].finish_reason == common_pb2.FINISH_REASON_STOP


async def test_longest_chain_of_references_ends_no_process(vllm: dict[str, str]) -> None:
    """llguidance follows them by recursion, in the scorer and in vLLM's engine."""
    chain: dict[str, Any] = {"d7000": {"type": "integer"}}
    chain |= {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(7000)}
    schema = json.dumps({"$defs": chain, "$ref": "#/$defs/d0"})
    constraint = common_pb2.Constraint(json_schema=schema)
    for _ in range(2):
        assert tokens_of(await generate(vllm["grpc"], [7], constraint=constraint))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculation": {"verification": {"rule": "VERIFICATION_RULE_COUPLED"}}}, "verification"),
        ({"constraint": {"regex": "((("}}, "regex"),
        ({"constraint": {"json_schema": ENDLESS}}, "json_schema"),
        ({"prompt_token_ids": [8192]}, "prompt"),
    ],
)
async def test_request_that_cannot_be_served_names_its_field(
    vllm: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    request = {"prompt_token_ids": [7], "sampling": {"temperature": 1.0, "seed": 1}, **fields}
    async with open_channel(vllm["grpc"]) as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.Generate(Request(**request), timeout=60):
                pass
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert param.encode() in dict(error.value.trailing_metadata())["grpc-status-details-bin"]


async def test_cancelled_request_leaves_the_engine(vllm: dict[str, str]) -> None:
    stop = common_pb2.StopParams(max_tokens=400, ignore_eos=True)

    def leave(num_tokens: int) -> None:
        if num_tokens >= 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await generate(vllm["grpc"], [9, 10], leave, stop=stop)
    deadline = time.monotonic() + 20
    while await running(vllm["grpc"]):
        assert time.monotonic() < deadline, "the request still runs"
        await asyncio.sleep(0.1)


def test_gateway_over_vllm_answers_openai_clients_and_counts(vllm: dict[str, str]) -> None:
    with service("gateway", "--scorer", vllm["grpc"], "--model", "embedded") as process:
        url = addresses(process)["http"]
        body = {"model": "default", "prompt": TEXTS[0], "temperature": 0, "max_tokens": 30}
        whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        text = whole["choices"][0]["text"]
        stopped = httpx.post(
            f"{url}/v1/completions", json=body | {"stop": text[8:12]}, timeout=60
        ).json()
        assert stopped["choices"][0]["text"] == text[: text.index(text[8:12])]
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(each)["choices"][0]["text"] for each in lines) == text
    metrics = httpx.get(vllm["metrics"], timeout=10).text
    assert 'outrider:generation_tokens_total{model_name="default"}' in metrics
    assert "vllm:num_requests_running" in metrics
    assert 'outrider:request_success_total{finished_reason="length"' in metrics


async def answer_over(
    first: str,
    other: str,
    other_pid: int,
    fail: Callable[[], None],
    sampling: common_pb2.SamplingParams = GREEDY,
) -> tuple[list[int], generation_pb2.GenerateResponse]:
    """What a gateway answers that begins with the scorer `first`, which fails after ten tokens."""
    targets = f"{first},{other}"
    os.kill(other_pid, signal.SIGSTOP)  # so that the gateway begins with the first
    try:
        with service("gateway", "--scorer", targets, "--model", "embedded") as gateway:
            address = addresses(gateway)["grpc"]

            def on_tokens(number: int) -> None:
                if number >= 10:
                    os.kill(other_pid, signal.SIGCONT)
                    fail()

            return await _answer(address, on_tokens, sampling)
    finally:
        os.kill(other_pid, signal.SIGCONT)


async def _answer(
    gateway: str, on_tokens: Callable[[int], None], sampling: common_pb2.SamplingParams
) -> tuple[list[int], generation_pb2.GenerateResponse]:
    request = generation_pb2.GenerateRequest(
        text=TEXTS[1],
        sampling=sampling,
        stop=common_pb2.StopParams(max_tokens=120, ignore_eos=True),
        aux_info=True,
    )
    responses = []
    async with open_channel(gateway) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for response in stub.Generate(request, timeout=100):
            responses.append(response)
            on_tokens(sum(len(each.tokens) for each in responses))
    return [token.id for each in responses for token in each.tokens], responses[-1]


async def test_vllm_goes_on_with_the_text_of_a_native_scorer_that_is_killed(
    vllm: dict[str, str], process: subprocess.Popen[str], native: str, tokenizer: Tokenizer
) -> None:
    stop = common_pb2.StopParams(max_tokens=120, ignore_eos=True)
    expected = tokens_of(await generate(native, tokenizer.encode(TEXTS[1]), stop=stop))
    flags = (*SMALL, "--threads", 1, "--engine", "native")
    with service("scorer_service", *flags) as victim:
        first = addresses(victim)["grpc"]
        tokens, last = await answer_over(first, vllm["grpc"], process.pid, victim.kill)
    assert tokens == expected
    assert last.aux_info.retries == 1


async def test_own_speculation_keeps_the_text_until_its_engine_is_killed(
    native: str, native_process: subprocess.Popen[str], tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(TEXTS[1])
    stop = common_pb2.StopParams(max_tokens=120, ignore_eos=True)
    expected = tokens_of(await generate(native, prompt, stop=stop))
    with vllm_scorer(speculative=NGRAM) as process:
        address = addresses(process)["grpc"]
        repeating = [10, 20, 30, 40]
        drafted = await generate(address, repeating)
        assert tokens_of(drafted) == tokens_of(await generate(native, repeating))
        account = drafted[-1].aux_info
        assert account.drafted >= account.accepted > 0
        assert account.rounds + account.accepted == len(tokens_of(drafted))
        with pytest.raises(grpc.aio.AioRpcError, match="vLLM's own ngram with 3"):
            await generate(address, prompt, speculation=common_pb2.SpeculationParams(enabled=False))
        [engine] = [pid for pid in descendants(process.pid) if "EngineCore" in title(pid)]

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

        tokens, last = await answer_over(address, native, native_process.pid, kill)
        assert tokens == expected
        assert last.aux_info.retries == 1
        assert process.wait(30) == 1


SAMPLED = common_pb2.SamplingParams(temperature=1.0, seed=5, top_p=0.95)


async def test_proposer_behind_the_scorers_port_changes_no_sampled_text(
    served: Up, native: str, tokenizer: Tokenizer
) -> None:
    prompt, scorer = tokenizer.encode(TEXTS[0]), served.scorer
    coupled = common_pb2.SpeculationParams()
    coupled.verification.rule = common_pb2.VERIFICATION_RULE_COUPLED
    drafted = await generate(scorer, prompt, sampling=SAMPLED, speculation=coupled)
    off = common_pb2.SpeculationParams(enabled=False)
    plain = await generate(scorer, prompt, sampling=SAMPLED, speculation=off)
    ours = await generate(native, prompt, sampling=SAMPLED)
    assert tokens_of(drafted) == tokens_of(plain) == tokens_of(ours)
    account = drafted[-1].aux_info
    assert account.drafted >= account.accepted > 0
    assert account.rounds < len(tokens_of(drafted))
    [counts] = account.by_method
    assert (counts.method, counts.accepted) == ("draft_model", account.accepted)
    assert len(account.proposer_ids) == 1
    assert account.verification == "coupled"
    assert plain[-1].aux_info.drafted == 0
    two = common_pb2.SpeculationParams(num_speculative_tokens=2)
    shorter = await generate(scorer, prompt, sampling=SAMPLED, speculation=two)
    assert tokens_of(shorter) == tokens_of(plain)
    assert 2 <= len(shorter[-1].aux_info.k_histogram) <= 3
    other = common_pb2.SpeculationParams(methods=["suffix"])  # nobody drafts by it
    assert (await generate(scorer, prompt, speculation=other))[-1].aux_info.drafted == 0
    async with open_channel(scorer) as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        info = await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=10)
    assert [proposer.method for proposer in info.proposers] == ["draft_model"]


async def test_sampled_text_of_a_native_scorer_that_is_killed_goes_on_with_vllm_and_a_proposer(
    served: Up, native: str, tokenizer: Tokenizer
) -> None:
    stop = common_pb2.StopParams(max_tokens=120, ignore_eos=True)
    expected = await generate(native, tokenizer.encode(TEXTS[1]), sampling=SAMPLED, stop=stop)
    flags = (*SMALL, "--threads", 1, "--engine", "native")
    with service("scorer_service", *flags) as victim:
        first, vllm_pid = addresses(victim)["grpc"], served.services["scorer_service"]
        tokens, last = await answer_over(first, served.scorer, vllm_pid, victim.kill, SAMPLED)
    assert tokens == tokens_of(expected)
    assert (last.aux_info.retries, last.aux_info.exact) == (1, True)


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def title(pid: int) -> str:
    folder = Path(f"/proc/{pid}")
    return (folder / "cmdline").read_text() + (folder / "comm").read_text()


async def test_drained_scorer_ends_its_requests_and_takes_no_more(
    vllm: dict[str, str], process: subprocess.Popen[str]
) -> None:
    stop = common_pb2.StopParams(max_tokens=200, ignore_eos=True)
    begun = asyncio.Event()
    running = asyncio.create_task(generate(vllm["grpc"], [9, 10], lambda _: begun.set(), stop=stop))
    await begun.wait()
    process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(vllm["grpc"], [9])
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(tokens_of(await running)) == 200
    assert await asyncio.to_thread(process.wait, 40) == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--no-such-flag",), "vLLM's flags: unrecognized arguments: --no-such-flag"),
        (
            ("--tensor-parallel-size", 0),
            "[^:]*this: tensor_parallel_size: Input should be",
        ),
        (("--quantization", "awq"), "vLLM does not serve this: [^;]* awq"),
        (("--kv-cache-memory-bytes", 1000), "vLLM does not serve this: No available memory"),
        (("--async-scheduling",), "--async-scheduling takes no proposers here: vLLM turned it off"),
    ],
)
def test_failed_start_ends_with_vllms_reason_in_one_line(
    flags: tuple[object, ...], reason: str
) -> None:
    """The last reason is known to a process of vLLM alone."""
    command = [sys.executable, "-m", "scorer_service", "--engine", "vllm", *map(str, SMALL)]
    command += ["--port", "0", "--data-port", "0", "--metrics-port", "0"]
    command += ["--", "--enforce-eager", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350)
    assert done.returncode == 2
    assert re.match(f"scorer: {reason}", done.stderr.splitlines()[-1])
