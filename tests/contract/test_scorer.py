"""The scorer over real RPC: text never depends on proposers, and every error says what it is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import errors
from outrider.policy.base import FixedPolicy, Row
from outrider.rpc import status
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, draft_pb2, scorer_pb2, scorer_pb2_grpc
from scorer_service.config import DraftLimits
from tests.support.services.scorer import (
    MAX_LEN,
    VOCAB,
    PacedModel,
    RunningScorer,
    generate_request,
    running_scorer,
)
from tests.support.services.scripted_proposer import (
    Drafted,
    Script,
    ScriptedProposer,
    block,
    follow,
    hello,
    proposing,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SLOW_S = 0.003
_model = PacedModel()
greedy_text = _model.greedy_text


def greedy_truth(tokens: Sequence[int]) -> list[int]:
    return greedy_text(tokens, 8)


def known_text(prompt: Sequence[int], text: Sequence[int]) -> Callable[[Sequence[int]], list[int]]:
    """A truth that was observed before, at any temperature."""
    whole = [*prompt, *text]
    return lambda tokens: whole[len(tokens) : len(tokens) + 8]


def right_then_wrong(session: Drafted) -> list[draft_pb2.Block]:
    right = greedy_truth(session.tokens)[: session.num_draft_tokens]
    return [block(session, [*right[:2], *((t + 1) % VOCAB for t in right[2:])])] if right else []


def bushy(session: Drafted) -> list[draft_pb2.Block]:
    """The truth as a second branch: of use only where a commit has walked the scorer onto it."""
    right = greedy_truth(session.tokens)[:3]
    wrong = (right[0] + 1) % VOCAB
    return [block(session, [wrong, *right], parents=[-1, -1, 1, 2])]


def ahead(session: Drafted) -> list[draft_pb2.Block]:
    """Longer than asked, and repeated."""
    blocks = [block(session, greedy_truth(session.tokens))]
    return blocks * 2


SCRIPTS: dict[str, Script] = {
    "right": follow(greedy_truth),
    "wrong": follow(greedy_truth, shift=1),
    "right_then_wrong": right_then_wrong,
    "bushy": bushy,
    "ahead": ahead,
    "silent": lambda _session: [],
    "empty": lambda session: [block(session, [])],
}


@pytest.fixture(params=[True, False], ids=["data connection", "stream"])
def data_connections(request: pytest.FixtureRequest) -> bool:
    """How what proposers say travels."""
    return bool(request.param)


@pytest.mark.parametrize("name", SCRIPTS)
async def test_generate_with_any_drafts_keeps_the_greedy_text(
    name: str, data_connections: bool
) -> None:
    async with running_scorer(data_connections=data_connections) as scorer:
        async with proposing(ScriptedProposer(scorer.stub, SCRIPTS[name])) as proposer:
            output = await scorer.generate(PROMPT)
            await scorer.until(lambda: not proposer.sessions, "Close")
            assert (await scorer.info()).proposers[0].proposer_id == "proposer-0"
            assert (proposer.data is not None) == data_connections
        assert output.token_ids == greedy_text(PROMPT, 40)
        assert len(output.kinds) == 40
        aux = output.aux_info
        assert aux.output_len == 40
        if name in ("right", "ahead", "right_then_wrong"):
            assert 0 < aux.accepted == 40 - aux.rounds  # how many is a matter of time
            assert list(aux.proposer_ids) == ["proposer-0"]
            assert output.kinds.count(common_pb2.TOKEN_KIND_ACCEPTED) == aux.accepted
            assert scorer.metric("spec_decode_num_accepted_tokens_total") == aux.accepted
            assert scorer.metric("spec_decode_num_draft_tokens_total") == aux.drafted
            per_pos = scorer.metric("spec_decode_num_accepted_tokens_per_pos_total", position="0")
            assert per_pos == aux.accepted_per_pos[0]
        elif name != "bushy":
            assert aux.accepted == 0
        assert scorer.metric("draft_blocks_total", fate="malformed") == 0


async def test_generate_with_stream_interval_delays_tokens() -> None:
    request = generate_request(PROMPT, max_tokens=100)
    request.stream_interval = 16
    async with (
        running_scorer() as scorer,
        proposing(ScriptedProposer(scorer.stub, SCRIPTS["right"])),
    ):
        messages = [list(message.token_ids) async for message in scorer.stub.Generate(request)]
    first, *between, _ = map(len, messages)
    assert 0 < first < 16
    assert all(size >= 16 for size in between)
    assert [token for message in messages for token in message] == greedy_text(PROMPT, 100)


async def test_generate_with_any_drafts_keeps_the_sampled_text() -> None:
    async with running_scorer() as scorer:
        plain = await scorer.generate(PROMPT, temperature=0.9, enabled=False)
        assert plain.token_ids != greedy_text(PROMPT, 40)
        for shift in (0, 1):
            truth = known_text(PROMPT, plain.token_ids)
            proposer = ScriptedProposer(scorer.stub, follow(truth, shift=shift))
            async with proposing(proposer):
                drafted = await scorer.generate(PROMPT, temperature=0.9)
            assert drafted.token_ids == plain.token_ids
            assert (drafted.aux_info.accepted > 0) == (shift == 0)
            sampling = proposer.opens[0].sampling
            fields = [f.name for f in sampling.DESCRIPTOR.fields if f.has_presence]
            assert all(map(sampling.HasField, fields))


async def generate_logprobs(
    scorer: RunningScorer, *, resumed: Sequence[int] = (), enabled: bool = True
) -> list[tuple[int, common_pb2.TokenLogprobs]]:
    """Tokens and their log probabilities, of a request that penalises and must not stop."""
    left = 40 - len(resumed)
    request = generate_request([*PROMPT, *resumed], temperature=0.8, enabled=enabled)
    request.sampling.frequency_penalty = 1.1
    request.sampling.repetition_penalty = 1.4
    request.sampling.logit_bias.add(token_id=9, bias=-100)
    request.stop.max_tokens = request.stop.min_tokens = left
    request.stop.stop_token_ids[:] = range(8)
    request.top_logprobs = 2
    request.num_resumed_tokens = len(resumed)
    answer: list[tuple[int, common_pb2.TokenLogprobs]] = []
    async for response in scorer.stub.Generate(request, timeout=30):
        answer += zip(response.token_ids, response.logprobs, strict=True)
    return answer


async def test_generate_with_any_drafts_keeps_penalties_and_logprobs() -> None:
    async with running_scorer() as scorer:
        plain = await generate_logprobs(scorer, enabled=False)
        text = [token for token, _ in plain]
        assert len(text) == 40
        assert not {*range(8), 9} & {*text}
        for i, (token, logprobs) in enumerate(plain):
            logits = _model.logits_of([*PROMPT, *text[:i]]).astype(np.float64)
            truth = logits - np.log(np.exp(logits).sum())
            assert logprobs.logprob == pytest.approx(truth[token], abs=1e-5)
            assert list(logprobs.top_token_ids) == np.argsort(-truth)[:2].tolist()
            assert list(logprobs.top_logprobs) == pytest.approx(-np.sort(-truth)[:2], abs=1e-5)
        async with proposing(ScriptedProposer(scorer.stub, follow(known_text(PROMPT, text)))):
            assert await generate_logprobs(scorer) == plain
            assert scorer.metric("spec_decode_num_accepted_tokens_total") > 0
            for done in (1, 17, 39):
                assert await generate_logprobs(scorer, resumed=text[:done]) == plain[done:]


async def test_scorer_with_many_requests_sends_one_message_per_step() -> None:
    prompts = [[i % VOCAB, 7, (3 * i) % VOCAB] for i in range(24)]
    async with (
        running_scorer() as scorer,
        proposing(ScriptedProposer(scorer.stub, follow(greedy_truth))) as proposer,
    ):
        outputs = await asyncio.gather(*(scorer.generate(prompt) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == greedy_text(prompt, 40)
        await scorer.until(lambda: len(proposer.closes) == len(prompts), "every Close")
        assert len({opened.session for opened in proposer.opens}) == len(prompts)
        assert not proposer.sessions


async def test_scorer_with_large_sessions_opens_one_after_the_other() -> None:
    async with running_scorer(pause_s=0.1) as scorer:

        async def request(first: int) -> list[int]:
            message = generate_request([first, *PROMPT], max_tokens=100)
            message.speculation.advice.token_ids.extend([1] * 2**18)
            return [t async for r in scorer.stub.Generate(message, timeout=60) for t in r.token_ids]

        requests = [asyncio.create_task(request(first)) for first in range(3)]
        await scorer.until(lambda: scorer.hub.registry.num_undrafted == 3, "all submitted")
        async with proposing(ScriptedProposer(scorer.stub, follow(greedy_truth))) as proposer:
            scorer.model.pause_s = 0.0
            texts = await asyncio.gather(*requests)
            assert len(proposer.opens) == 3
            assert proposer.error is None
    assert texts == [greedy_text([first, *PROMPT], 100) for first in range(3)]


async def test_generate_with_speculation_params_opts_out_or_chooses_its_method() -> None:
    async with (
        running_scorer() as scorer,
        proposing(ScriptedProposer(scorer.stub, follow(greedy_truth))) as proposer,
    ):
        off = await scorer.generate(PROMPT, enabled=False)
        other = await scorer.generate(PROMPT, method="ngram")
        assert proposer.opens == []
        assert off.token_ids == other.token_ids == greedy_text(PROMPT, 40)
        own = await scorer.generate(PROMPT, method="draft_model")
        assert own.aux_info.accepted > 0


async def test_scorer_with_blocks_of_stale_epochs_drops_them_silently() -> None:
    def stale(session: Drafted) -> list[draft_pb2.Block]:
        tokens = greedy_truth(session.tokens)[:4]
        return [block(session, tokens, epoch=session.epoch + d) for d in (-1, 1)]

    async with running_scorer() as scorer:
        proposer = ScriptedProposer(scorer.stub, stale)
        async with proposing(proposer):
            output = await scorer.generate(PROMPT)
            assert not proposer.ended.is_set()
        assert output.token_ids == greedy_text(PROMPT, 40)
        assert output.aux_info.drafted == 0
        assert scorer.metric("draft_blocks_total", fate="stale") > 0
        assert scorer.metric("draft_blocks_total", fate="malformed") == 0


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "token beyond the vocabulary": {"token_ids": [VOCAB]},
    "parent after its child": {"token_ids": [1, 2], "parents": [1, -1]},
    "parent below the root": {"token_ids": [1], "parents": [-2]},
    "too few parents": {"token_ids": [1, 2], "parents": [-1]},
    "too many nodes": {"token_ids": [1] * 513},
    "base not committed": {"base_len": 10_000},
    "session never opened": {"session": 12_345},
    "a method that Hello did not name": {"method_index": 1},
}


@pytest.mark.parametrize("what", BAD_FIELDS)
async def test_scorer_with_bad_blocks_counts_them_and_ends_the_stream(
    what: str, data_connections: bool
) -> None:
    # Not one more than it takes: a write that meets the stream's end hides the server's status.
    left = itertools.repeat(None, 3)

    def bad(session: Drafted) -> list[draft_pb2.Block]:
        return [
            block(session, **{"token_ids": [1], **BAD_FIELDS[what]})
            for _ in itertools.islice(left, 1)
        ]

    async with running_scorer(
        limits=DraftLimits(max_bad_blocks=3), pause_s=SLOW_S, data_connections=data_connections
    ) as scorer:
        proposer = ScriptedProposer(scorer.stub, bad)
        async with proposing(proposer):
            async with asyncio.timeout(20):
                while not proposer.ended.is_set():  # a request may end before three drafts came
                    output = await scorer.generate(PROMPT)
                    assert output.token_ids == greedy_text(PROMPT, 40)
        assert proposer.error is not None
        error = status.from_rpc_error(proposer.error)
        assert (type(error), error.reason) == (errors.InvalidRequestError, "BAD_BLOCKS")
        assert scorer.metric("draft_blocks_total", fate="malformed") == 3
        assert not (await scorer.info()).proposers


UINT32 = st.integers(0, 2**32 - 1)
FUZZED = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "session": st.integers(0, 4) | st.integers(0, 2**64 - 1),
            "epoch": st.integers(0, 3) | UINT32,
            "base_len": st.integers(0, 60) | UINT32,
            "token_ids": st.lists(st.integers(0, VOCAB) | UINT32, max_size=12),
            "parents": st.lists(st.integers(-2, 12), max_size=12),
            "draft_us": UINT32,
            "method_index": st.integers(0, 2) | UINT32,
        },
    ),
    max_size=4,
)


class Impatient(FixedPolicy):
    """Waits as long as a block takes, not much longer: most are of no use."""

    def patience_s(self, _row: Row) -> float:
        return 0.01


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(FUZZED, min_size=1, max_size=6))
def test_scorer_with_fuzzed_blocks_loses_speed_only(rounds: list[list[dict[str, Any]]]) -> None:
    turn = iter(range(10**9))

    def garbage(session: Drafted) -> list[draft_pb2.Block]:
        chosen = rounds[next(turn) % len(rounds)]
        return [block(session, **{"token_ids": [1], **fields}) for fields in chosen]

    async def run() -> None:
        async with (
            running_scorer(policy=Impatient) as scorer,
            proposing(ScriptedProposer(scorer.stub, garbage)),
        ):
            output = await scorer.generate(PROMPT, max_tokens=12)
            assert output.token_ids == greedy_text(PROMPT, 12)

    asyncio.run(run())


async def test_scorer_with_lost_session_reopens_it_a_few_times_at_most() -> None:
    async with running_scorer(limits=DraftLimits(max_reopens=2), pause_s=SLOW_S) as scorer:
        losses: asyncio.Queue[draft_pb2.Lost] = asyncio.Queue()

        def draft_and_lose(session: Drafted) -> list[draft_pb2.Block]:
            del proposer.sessions[session.id]
            losses.put_nowait(draft_pb2.Lost(session=session.id, epoch=session.epoch))
            return [block(session, [])]

        proposer = ScriptedProposer(scorer.stub, draft_and_lose)

        async def lose_all() -> None:
            for _ in range(3):
                await proposer.send(lost=await losses.get())

        async with proposing(proposer):
            losing = asyncio.create_task(lose_all())
            output = await scorer.generate(PROMPT, max_tokens=100)
            async with asyncio.timeout(10):
                await losing
        assert output.token_ids == greedy_text(PROMPT, 100)
        assert [opened.epoch for opened in proposer.opens] == [1, 2, 3]
        for opened in proposer.opens:
            prefix = list(opened.prefix)
            assert prefix == [*PROMPT, *output.token_ids][: len(prefix)]


async def test_scorer_when_proposer_dies_and_returns_keeps_the_text(data_connections: bool) -> None:
    async with running_scorer(pause_s=SLOW_S, data_connections=data_connections) as scorer:
        first = ScriptedProposer(scorer.stub, follow(greedy_truth))
        await first.dial()
        following = asyncio.create_task(first.run())
        request = asyncio.create_task(scorer.generate(PROMPT, max_tokens=140))
        await scorer.until(
            lambda: any(len(s.tokens) > 20 for s in first.sessions.values()), "some commits"
        )
        first.call.cancel()  # what a SIGKILL looks like from here
        await asyncio.gather(following, return_exceptions=True)
        await scorer.until(lambda: not scorer.hub.registry.proposers, "detached")
        second = ScriptedProposer(scorer.stub, follow(greedy_truth), hello(incarnation=2))
        async with proposing(second):
            output = await request
        assert output.token_ids == greedy_text(PROMPT, 140)
        assert len(second.opens) == 1
        resumed_at = len(second.opens[0].prefix)
        assert 20 < resumed_at < len(PROMPT) + 140
        assert second.opens[0].epoch == 2
        kinds = output.kinds[resumed_at - len(PROMPT) :]
        assert kinds.count(common_pb2.TOKEN_KIND_ACCEPTED) > 0, "speculation resumed"


async def test_scorer_after_goodbye_moves_the_sessions(data_connections: bool) -> None:
    async with running_scorer(pause_s=SLOW_S, data_connections=data_connections) as scorer:
        leaving = ScriptedProposer(scorer.stub, follow(greedy_truth), hello(proposer_id="a"))
        staying = ScriptedProposer(
            scorer.stub, follow(greedy_truth), hello(proposer_id="b", method="ngram")
        )
        async with proposing(leaving), proposing(staying):
            request = asyncio.create_task(scorer.generate(PROMPT, max_tokens=140))
            await scorer.until(lambda: bool(leaving.sessions), "opened on the draft model")
            await leaving.send(goodbye=draft_pb2.Goodbye())
            await scorer.until(lambda: not leaving.sessions, "closed")
            await leaving.call.done_writing()
            async with asyncio.timeout(10):
                await leaving.ended.wait()
            assert leaving.error is None
            output = await request
        assert output.token_ids == greedy_text(PROMPT, 140)
        assert list(output.aux_info.proposer_ids)[-1] == "b"
        assert staying.opens[0].epoch > leaving.opens[-1].epoch


REFUSALS: dict[str, dict[str, object]] = {
    "PROTOCOL_VERSION": {"protocol_version": 3},
    "VOCAB_MISMATCH": {"vocab_size": VOCAB + 1},
    "TOKENIZER_MISMATCH": {"tokenizer_hash": "cd" * 32},
    "UNKNOWN_METHOD": {"method": "telepathy"},
    "TOO_MANY_PROPOSERS": {"proposer_id": "another"},
    "OLDER_INCARNATION": {"incarnation": 0},
}


@pytest.mark.parametrize("reason", REFUSALS)
async def test_scorer_with_proposer_that_does_not_fit_refuses_with_the_reason(reason: str) -> None:
    async with running_scorer(limits=DraftLimits(max_proposers=1)) as scorer:
        first = ScriptedProposer(scorer.stub, follow(greedy_truth))
        async with proposing(first):
            refused = ScriptedProposer(scorer.stub, first.script, hello(**REFUSALS[reason]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused.dial()
            error = status.from_rpc_error(caught.value)
            assert (type(error), error.reason) == (errors.ProposerRefusedError, reason)
            output = await scorer.generate(PROMPT)
            assert output.aux_info.accepted > 0, "the one that fits is not disturbed"


async def test_scorer_with_name_that_could_forge_a_log_line_refuses_it() -> None:
    async with running_scorer() as scorer:
        for name in ("proposer_id", "pool", "model", "method", "tokenizer_hash", "device"):
            forging = hello(**{name: "a\nb"})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ScriptedProposer(scorer.stub, follow(greedy_truth), forging).dial()
            error = status.from_rpc_error(caught.value)
            assert isinstance(error, errors.InvalidRequestError)
            assert error.param == name
        assert not scorer.hub.registry.proposers


async def test_scorer_with_draft_padded_less_than_the_target_accepts_it() -> None:
    async with running_scorer() as scorer:
        for tokenizer_hash in ("", "cd" * 32):  # only the tokenizer says that nothing is missing
            other = hello(vocab_size=VOCAB - 1, tokenizer_hash=tokenizer_hash)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ScriptedProposer(scorer.stub, follow(greedy_truth), other).dial()
            assert status.from_rpc_error(caught.value).reason == "VOCAB_MISMATCH"
        smaller = hello(vocab_size=VOCAB - 1)
        async with proposing(ScriptedProposer(scorer.stub, follow(greedy_truth), smaller)):
            output = await scorer.generate(PROMPT)
    assert output.token_ids == greedy_text(PROMPT, 40)
    assert output.aux_info.accepted > 0


async def test_scorer_with_newer_proposer_speaks_its_own_older_version() -> None:
    newer = hello(protocol_version=2)
    newer.MergeFromString(b"\xf8\x7f\x01")  # a field of number 2047 that we do not know
    async with running_scorer() as scorer:
        proposer = ScriptedProposer(scorer.stub, follow(greedy_truth), newer)
        async with proposing(proposer):
            assert proposer.welcome is not None
            assert proposer.welcome.protocol_version == 1
            output = await scorer.generate(PROMPT)
    assert output.token_ids == greedy_text(PROMPT, 40)
    assert output.aux_info.accepted > 0


async def test_scorer_with_copying_proposer_needs_no_tokenizer() -> None:
    async with running_scorer() as scorer:
        fields = {"method": "ngram", "vocab_size": 0, "tokenizer_hash": ""}
        proposer = ScriptedProposer(scorer.stub, follow(greedy_truth), hello(**fields))
        async with proposing(proposer):
            assert proposer.welcome is not None
            assert proposer.welcome.scorer_id == "scorer-0"


async def test_scorer_when_a_proposer_dials_anew_replaces_it(data_connections: bool) -> None:
    async with running_scorer(data_connections=data_connections) as scorer:
        first = ScriptedProposer(scorer.stub, follow(greedy_truth))
        async with proposing(first):
            second = ScriptedProposer(scorer.stub, follow(greedy_truth), hello(incarnation=2))
            async with proposing(second):
                async with asyncio.timeout(10):
                    await first.ended.wait()
                assert first.error is not None
                assert first.error.code() is grpc.StatusCode.UNAVAILABLE
                assert (await scorer.generate(PROMPT)).aux_info.accepted > 0


async def test_scorer_without_hello_first_or_in_time_ends_the_stream() -> None:
    async with running_scorer(limits=DraftLimits(hello_timeout_s=0.1)) as scorer:
        silent = scorer.stub.Draft(timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await silent.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        rude = scorer.stub.Draft(timeout=10)
        await rude.write(draft_pb2.DraftRequest(goodbye=draft_pb2.Goodbye()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rude.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def _request(**fields: object) -> scorer_pb2.ScorerServiceGenerateRequest:
    values: dict[str, object] = {
        "prompt_token_ids": PROMPT,
        "sampling": common_pb2.SamplingParams(temperature=0),
        **fields,
    }
    return scorer_pb2.ScorerServiceGenerateRequest(**values)  # type: ignore[arg-type]


BAD_REQUESTS = {
    "empty prompt": (_request(prompt_token_ids=[]), "prompt", "INVALID_REQUEST"),
    "token": (_request(prompt_token_ids=[VOCAB]), "prompt", "INVALID_REQUEST"),
    "long": (_request(prompt_token_ids=[1] * MAX_LEN), "prompt", "PROMPT_TOO_LONG"),
    "seed": (_request(sampling=common_pb2.SamplingParams()), "seed", "INVALID_REQUEST"),
    "top_p": (
        _request(sampling=common_pb2.SamplingParams(temperature=0, top_p=2)),
        "top_p",
        "INVALID_REQUEST",
    ),
    "max_tokens": (
        _request(stop=common_pb2.StopParams(max_tokens=0)),
        "max_tokens",
        "INVALID_REQUEST",
    ),
    "method": (
        _request(speculation=common_pb2.SpeculationParams(method="telepathy")),
        "method",
        "INVALID_REQUEST",
    ),
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
async def test_generate_with_a_bad_request_names_the_field(what: str) -> None:
    request, param, reason = BAD_REQUESTS[what]
    async with running_scorer() as scorer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scorer.stub.Generate(request, timeout=10).read()
        error = status.from_rpc_error(caught.value)
        assert isinstance(error, errors.InvalidRequestError)
        assert (error.param, error.reason) == (param, reason)


async def test_generate_without_max_tokens_fills_the_context() -> None:
    async with running_scorer() as scorer:
        call = scorer.stub.Generate(_request(), timeout=20)
        tokens = [token async for response in call for token in response.token_ids]
        assert len(tokens) == MAX_LEN - len(PROMPT)


async def test_generate_when_client_leaves_keeps_nothing() -> None:
    async with running_scorer(pause_s=SLOW_S) as scorer:
        calls = [scorer.stub.Generate(generate_request(PROMPT, max_tokens=140)) for _ in range(6)]
        for i, call in enumerate(calls):
            if i % 2:
                await call.read()  # some in the middle, some at once
            call.cancel()
        await scorer.until(lambda: scorer.thread.snapshot().running == 0, "aborted", 5)


async def test_generate_when_client_does_not_read_stalls_nobody() -> None:
    async with running_scorer() as scorer:
        silent = scorer.stub.Generate(generate_request(PROMPT, max_tokens=140), timeout=30)
        await silent.read()
        output = await scorer.generate(PROMPT)
        assert output.token_ids == greedy_text(PROMPT, 40)
        await scorer.until(lambda: scorer.thread.snapshot().running == 0, "the silent one ended")
        silent.cancel()


async def test_generate_past_the_deadline_is_a_deadline_error() -> None:
    async with running_scorer(pause_s=0.05) as scorer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scorer.generate(PROMPT, max_tokens=140, timeout_s=0.3)
        assert isinstance(status.from_rpc_error(caught.value), errors.DeadlineError)


async def test_generate_when_forward_fails_ends_its_requests_and_no_other() -> None:
    async with running_scorer() as scorer:
        scorer.model.fail_next = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scorer.generate(PROMPT)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "fell over" not in (caught.value.details() or "")
        assert (await scorer.generate(PROMPT)).token_ids == greedy_text(PROMPT, 40)


async def test_scorer_when_draining_ends_late_requests_and_refuses_new_ones(
    data_connections: bool,
) -> None:
    async with running_scorer(pause_s=0.01, data_connections=data_connections) as scorer:
        proposer = ScriptedProposer(scorer.stub, lambda _session: [])
        async with proposing(proposer):
            quick = asyncio.create_task(scorer.generate(PROMPT, max_tokens=5))
            late = asyncio.create_task(scorer.generate(PROMPT, max_tokens=140))
            await scorer.until(lambda: scorer.thread.snapshot().running == 2, "both run")
            draining = asyncio.create_task(scorer.servicer.drain(0.4))
            await asyncio.sleep(0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await scorer.generate(PROMPT)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (await quick).token_ids == greedy_text(PROMPT, 5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await late
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await draining
            async with asyncio.timeout(10):
                await proposer.ended.wait()


async def test_scorer_before_the_engine_is_up_is_unavailable() -> None:
    from outrider.rpc.server import GrpcServer
    from outrider.rpc.telemetry import configure
    from scorer_service.call import SERVICE_NAME
    from scorer_service.servicer import ScorerServicer, add_to_server

    telemetry = configure("starting")
    servicer = ScorerServicer(telemetry)
    server = GrpcServer(
        "127.0.0.1:0",
        lambda s: add_to_server(servicer, s),
        [SERVICE_NAME],
    )
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(_request(), timeout=10).read()
        assert isinstance(status.from_rpc_error(caught.value), errors.UnavailableError)
    await server.stop(0)
    telemetry.shutdown()
