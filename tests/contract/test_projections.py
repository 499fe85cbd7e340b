"""The matrix that a scorer multiplies hidden states by: sent after Welcome, checked, kept."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace

import grpc
import pytest
import torch

from outrider.draft_tree import DraftTree
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.features import FeatureSpec
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits
from tests.support.models.features import CAPTURED, RowReader, selection
from tests.support.services.draft_scorer import DraftScorer
from tests.support.services.reader_service import serving
from tests.support.services.scorer import VOCAB, RunningScorer, running_scorer
from tests.support.services.scripted_proposer import ScriptedProposer, hello

SPEC, MATRIX = selection(CAPTURED, 6)
PACKED = MATRIX.view(torch.uint8).numpy().tobytes()
OTHER = replace(SPEC, projection_dim=3, projection_sha256=hashlib.sha256(bytes(96)).digest())
assert OTHER.projection_bytes == 96


async def dialled(
    scorer: RunningScorer, spec: FeatureSpec = SPEC, name: str = "p"
) -> ScriptedProposer:
    asked = draft_pb2.FeatureSpec(
        layers=spec.layers,
        final_norm=spec.final_norm,
        hidden_size=spec.hidden_size,
        projection_dim=spec.projection_dim,
        projection_sha256=spec.projection_sha256,
    )
    about = hello(method="eagle3", features=asked, proposer_id=name)
    proposer = ScriptedProposer(scorer.stub, lambda _: [], about)
    await proposer.dial()
    return proposer


async def ending(proposer: ScriptedProposer) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await proposer.call.read()
    return caught.value


def chunk(offset: int, data: bytes) -> draft_pb2.ProjectionChunk:
    return draft_pb2.ProjectionChunk(offset=offset, data=data)


async def test_projection_when_incomplete_opens_no_session() -> None:
    async with running_scorer(features=CAPTURED) as scorer:
        proposer = await dialled(scorer)
        assert proposer.welcome is not None
        assert proposer.welcome.wants_projection
        [attached] = scorer.hub.registry.proposers
        await proposer.send(projection=chunk(0, PACKED[:100]))
        await scorer.generate([1, 2, 3], max_tokens=3)
        assert not attached.has_room
        await proposer.send(projection=chunk(100, PACKED[100:]))
        await scorer.until(lambda: attached.has_room, "it is ready")
        again = await dialled(scorer, name="another")
        assert again.welcome is not None
        assert not again.welcome.wants_projection
        for each in (proposer, again):
            each.call.cancel()


BAD = {
    "not the digest's": [chunk(0, bytes(len(PACKED)))],
    "a gap": [chunk(4, PACKED)],
    "too much": [chunk(0, PACKED + b"more")],
    "empty": [chunk(0, b"")],
    "something else": [None],
}


@pytest.mark.parametrize("what", BAD)
async def test_projection_other_than_announced_ends_the_stream(what: str) -> None:
    async with running_scorer(features=CAPTURED) as scorer:
        proposer = await dialled(scorer)
        for part in BAD[what]:
            if part is None:
                await proposer.call.write(draft_pb2.DraftRequest(blocks=draft_pb2.BlockBatch()))
            else:
                await proposer.send(projection=part)
        error = await ending(proposer)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "rojection" in str(error.details())
        await scorer.until(lambda: not scorer.hub.registry.proposers, "it is gone")


async def test_projection_that_is_late_ends_the_stream() -> None:
    async with running_scorer(
        features=CAPTURED, limits=DraftLimits(projection_timeout_s=0.05)
    ) as scorer:
        error = await ending(await dialled(scorer))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_projection_without_room_on_the_device_is_refused_and_can_be_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    async with running_scorer(features=CAPTURED) as scorer:
        with monkeypatch.context() as patch:
            patch.setattr(HiddenStateStreams, "put_projection", full)
            proposer = await dialled(scorer)
            await proposer.send(projection=chunk(0, PACKED))
            error = await ending(proposer)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "OutOfMemoryError" in str(error.details())
        await scorer.until(lambda: not scorer.hub.registry.proposers, "it is gone")
        again = await dialled(scorer)
        assert again.welcome is not None
        assert again.welcome.wants_projection
        again.call.cancel()
        assert (await scorer.generate([1, 2], max_tokens=3)).token_ids


async def test_projections_when_idle_make_room_for_others() -> None:
    limits = DraftLimits(max_projections=1)
    async with running_scorer(features=CAPTURED, limits=limits) as scorer:
        first = await dialled(scorer)
        await first.send(projection=chunk(0, PACKED))
        [attached] = scorer.hub.registry.proposers
        await scorer.until(lambda: attached.ready, "it is ready")
        second = await dialled(scorer, OTHER, "q")
        await second.send(projection=chunk(0, bytes(96)))
        error = await ending(second)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "in use" in str(error.details())
        first.call.cancel()
        await scorer.until(lambda: not scorer.hub.registry.proposers, "both are gone")
        third = await dialled(scorer, OTHER, "r")
        await third.send(projection=chunk(0, bytes(96)))
        await scorer.until(
            lambda: any(p.ready for p in scorer.hub.registry.proposers), "it is ready"
        )
        third.call.cancel()


async def test_projection_of_an_ended_stream_stays_for_another_proposer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    put = HiddenStateStreams.put_projection

    def slow(streams: HiddenStateStreams, spec: FeatureSpec, matrix: bytearray) -> None:
        entered.set()
        assert go_on.wait(20)
        put(streams, spec, matrix)

    monkeypatch.setattr(HiddenStateStreams, "put_projection", slow)
    async with running_scorer(features=CAPTURED) as scorer:
        first = await dialled(scorer)
        await first.send(projection=chunk(0, PACKED))
        await scorer.until(entered.is_set, "the engine takes it")
        second = await dialled(scorer, name="q")
        assert second.welcome is not None
        assert second.welcome.wants_projection, "it is not there yet"
        first.call.cancel()
        await scorer.until(lambda: len(scorer.hub.registry.proposers) == 1, "the first is gone")
        await second.send(projection=chunk(0, PACKED))
        go_on.set()
        [attached] = scorer.hub.registry.proposers
        await scorer.until(lambda: attached.ready, "it is ready")
        third = await dialled(scorer, name="r")
        assert third.welcome is not None
        assert not third.welcome.wants_projection
        for each in (second, third):
            each.call.cancel()


async def test_projections_beyond_max_projections_are_not_read_at_once() -> None:
    async with running_scorer(features=CAPTURED, limits=DraftLimits(max_projections=1)) as scorer:
        first = await dialled(scorer)
        await first.send(projection=chunk(0, PACKED[:-1]))
        reading = scorer.hub.registry.projections._reading
        await scorer.until(reading.locked, "the first is read")
        second = await dialled(scorer, OTHER, "q")
        await second.send(projection=chunk(0, bytes(96)))
        await first.send(projection=chunk(len(PACKED) - 1, PACKED[-1:]))
        assert "in use" in str((await ending(second)).details()), "the first was before it"
        [attached] = scorer.hub.registry.proposers
        await scorer.until(lambda: attached.ready, "the first is there")
        first.call.cancel()


async def test_projection_that_is_too_large_is_refused() -> None:
    async with running_scorer(
        features=CAPTURED, limits=DraftLimits(max_projection_bytes=100)
    ) as scorer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await dialled(scorer)
        assert "may have 100 bytes" in str(caught.value.details())


async def test_projection_when_wanted_is_sent_in_chunks() -> None:
    spec = FeatureSpec(1024, (1, 2), projection_dim=600, projection_sha256=bytes(32))
    matrix = torch.randn(600, 2048).to(torch.bfloat16)
    method = RowReader(
        spec, lambda t, _: DraftTree.chain(len(t), ()), vocab_size=VOCAB, projection=matrix
    )
    scorer = DraftScorer()
    scorer.wants_projection = True
    address = await scorer.start()
    async with serving(address, method):
        stream = await scorer.attached()
        assert stream.hello.features.projection_dim == 600
        received = b""
        while len(received) < spec.projection_bytes:
            message = await stream.next()
            assert message.projection.offset == len(received)
            assert len(message.projection.data) <= 2**20
            received += message.projection.data
        assert received == method.projection
        await stream.silence()
    await scorer.stop()
