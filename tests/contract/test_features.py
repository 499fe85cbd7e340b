"""Hidden states over the Draft stream: a real scorer, a real proposer, and states known before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
import torch
from torch import Tensor

import outrider.engine.hidden_states.streams as feature_streams
import outrider.features as features
from outrider.draft_tree import DraftTree
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.hybrid import HybridProposer
from outrider.drafting.proposer import Proposer
from outrider.features import FeatureSpec
from outrider.rpc.feature_codec import features_from_proto
from outrider.v1 import draft_pb2
from tests.support.models.features import CAPTURED, NUM_LAYERS, SIZE, RowReader, row, selection
from tests.support.services.draft_scorer import DraftScorer, commit, open_
from tests.support.services.reader_service import serving
from tests.support.services.scorer import VOCAB, RunningScorer, running_scorer
from tests.support.services.scripted_proposer import ScriptedProposer, hello

FINAL = FeatureSpec(SIZE, (), final_norm=True)


def half_right(scorer: RunningScorer) -> Callable[[Sequence[int], int], DraftTree]:
    """The target's own next tokens; every third draft ends in a wrong one."""

    def make_draft(tokens: Sequence[int], k: int) -> DraftTree:
        text = scorer.model.greedy_text(tokens, k)
        if len(tokens) % 3 == 0 and k:
            text[-1] = (text[-1] + 1) % VOCAB
        return DraftTree.chain(len(tokens), text)

    return make_draft


def reader(scorer: RunningScorer, spec: FeatureSpec, projection: Tensor | None = None) -> RowReader:
    return RowReader(spec, half_right(scorer), vocab_size=VOCAB, projection=projection)


def rows_of(session: int, start: int, rows: list[Tensor], epoch: int = 1) -> draft_pb2.Features:
    packed = torch.cat(rows).view(torch.uint8).numpy().tobytes()
    return draft_pb2.Features(session=session, epoch=epoch, start=start, rows=packed)


@asynccontextmanager
async def attached(scorer: RunningScorer, method: Proposer) -> AsyncIterator[None]:
    """A proposer service with `method`, which the scorer may give sessions."""
    async with serving(scorer.address, method):
        await scorer.until(
            lambda: any(p.ready for p in scorer.hub.registry.proposers), "a proposer is attached"
        )
        yield


@pytest.mark.parametrize(
    "spec",
    [FINAL, FeatureSpec(SIZE, (2,)), FeatureSpec(SIZE, (NUM_LAYERS, 0)), CAPTURED],
    ids=["final", "one layer", "another order", "all"],
)
async def test_features_of_running_requests_are_sent_complete_and_correct(
    spec: FeatureSpec,
) -> None:
    prompts = [[(7 * i + j) % VOCAB for j in range(5 + 30 * i)] for i in range(4)]
    async with running_scorer(features=CAPTURED) as scorer:
        method = reader(scorer, spec)
        async with attached(scorer, method):
            outputs = await asyncio.gather(*(scorer.generate(p, max_tokens=30) for p in prompts))
        assert features_from_proto((await scorer.info()).features) == CAPTURED
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == scorer.model.greedy_text(prompt, 30)
        assert sum(output.aux_info.accepted for output in outputs) > 20
        assert method.wrong == 0
        assert method.rows_seen > sum(map(len, prompts))
        assert scorer.metric("feature_rows_total") >= method.rows_seen
        assert scorer.metric("feature_bytes_total") >= method.rows_seen * spec.row_bytes


async def test_features_with_projection_are_multiplied_by_the_proposers_matrix() -> None:
    spec, matrix = selection(CAPTURED, 6)
    async with running_scorer(features=CAPTURED) as scorer:
        for _ in range(2):  # the second time the scorer has the matrix
            method = reader(scorer, spec, matrix)
            async with attached(scorer, method):
                output = await scorer.generate([1, 2, 3, 4], max_tokens=20)
            assert output.aux_info.accepted > 0
            assert (method.wrong, method.rows_seen > 10) == (0, True)


async def test_features_of_a_cached_prefix_are_sent_like_any_other() -> None:
    prompt = [i % VOCAB for i in range(80)]
    async with running_scorer(features=CAPTURED) as scorer:
        await scorer.generate(prompt, max_tokens=2)
        method = reader(scorer, CAPTURED)
        async with attached(scorer, method):
            output = await scorer.generate(prompt, max_tokens=20)
        assert output.aux_info.cached_prompt_tokens == 76  # as without features
        assert method.wrong == 0
        assert method.rows_seen >= 80


async def test_features_for_a_slow_reader_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_streams, "MAX_ROWS", 3)
    monkeypatch.setattr(features, "MAX_ON_THE_WAY", 5 * CAPTURED.row_bytes)
    prompt = [i % VOCAB for i in range(80)]
    async with running_scorer(features=CAPTURED) as scorer:
        await scorer.generate(prompt, max_tokens=2)
        method = reader(scorer, CAPTURED)
        async with attached(scorer, method):
            output = await scorer.generate(prompt, max_tokens=60)
        assert output.aux_info.accepted > 0
        assert method.wrong == 0
        assert method.rows_seen > 80


async def test_features_when_missing_let_the_session_wait_without_repeated_requests() -> None:
    prompt = [i % VOCAB for i in range(20)]
    rows = [row(prompt[: i + 1], CAPTURED) for i in range(20)]
    method = RowReader(CAPTURED, lambda t, k: DraftTree.chain(len(t), (1,) * k), vocab_size=VOCAB)
    scorer = DraftScorer()
    address = await scorer.start()
    async with serving(address, method):
        stream = await scorer.attached()
        assert stream.hello.features.final_norm
        assert list(stream.hello.features.layers) == list(CAPTURED.layers)
        stream.send(opens=[open_(1, prompt)])
        stream.send(features=[rows_of(1, 0, rows[:10])])
        stream.send(features=[rows_of(1, 0, rows[:12])])  # an overlap does no harm
        await stream.silence()
        assert method.unfinished <= 3
        stream.send(features=[rows_of(1, 12, rows[12:19], epoch=2)])  # of another epoch
        await stream.silence()
        stream.send(features=[rows_of(1, 12, rows[12:19])])
        block = await stream.next_block()
        assert (block.base_len, list(block.token_ids)) == (20, [1, 1, 1, 1])
        assert (method.rows_seen, method.wrong) == (19, 0)
        stream.send(features=[rows_of(1, 25, rows[:1])])  # a gap
        stream.send(commits=[commit(1, 20, [3])])
        assert (await stream.next_lost()).session == 1
    await scorer.stop()


async def test_features_of_a_reopened_session_are_sent_again() -> None:
    prompt = list(range(20))
    async with running_scorer(features=CAPTURED, pause_s=0.01) as scorer:
        method = reader(scorer, CAPTURED)
        request = asyncio.create_task(scorer.generate(prompt, max_tokens=100))
        async with attached(scorer, method):
            await scorer.until(lambda: method.rows_seen >= 20, "the session was drafted for")
            [session] = scorer.hub.registry.proposers[0].sessions.values()
            scorer.hub.registry.reassign(session)
            await scorer.until(lambda: len(method.seen) == 2, "and opened anew")
            output = await request
            assert session.losses.total() == 0
        assert output.token_ids == scorer.model.greedy_text(prompt, 100)
        assert method.wrong == 0
        assert min(method.seen.values()) >= 20


async def test_features_with_several_methods_are_read_by_one() -> None:
    prompt = [5, 6, 7, 8] * 6
    async with running_scorer(features=CAPTURED) as scorer:
        method = reader(scorer, FINAL)
        both = HybridProposer([method, NgramProposer(max_branches=0)])
        async with attached(scorer, both):
            output = await scorer.generate(prompt, max_tokens=30)
        assert output.token_ids == scorer.model.greedy_text(prompt, 30)
        assert (method.wrong, method.rows_seen > 24) == (0, True)


REFUSED = {
    "layers": (FeatureSpec(SIZE, (1, 2)), "--hidden-features 0,1,2,6,final"),
    "size": (FeatureSpec(SIZE + 1, (2,)), "5 values"),
    "projection": (replace(FINAL, projection_dim=SIZE + 1, projection_sha256=bytes(32)), "width"),
    "digest": (replace(FINAL, projection_dim=2), "projection_sha256"),
    "nothing": (FeatureSpec(SIZE), "layers"),
    "twice": (FeatureSpec(SIZE, (2, 2)), "different"),
    "many": (FeatureSpec(SIZE, (2,) * 17), "at most 16"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_features_that_are_not_captured_are_refused(what: str) -> None:
    spec, word = REFUSED[what]
    async with running_scorer(features=CAPTURED) as scorer:
        error = await refused(scorer, spec)
    assert word in error


async def test_features_on_scorer_without_any_names_the_flag() -> None:
    async with running_scorer() as scorer:
        error = await refused(scorer, FeatureSpec(SIZE, (2, 3), final_norm=True))
    assert "--hidden-features 2,3,final" in error


async def refused(scorer: RunningScorer, spec: FeatureSpec) -> str:
    asked = draft_pb2.FeatureSpec(
        layers=spec.layers,
        final_norm=spec.final_norm,
        hidden_size=spec.hidden_size,
        projection_dim=spec.projection_dim,
        projection_sha256=spec.projection_sha256,
    )
    proposer = ScriptedProposer(scorer.stub, lambda _: [], hello(method="eagle", features=asked))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await proposer.dial()
    return str(caught.value.details())
