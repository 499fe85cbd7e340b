"""What a proposer is sent, and in which order: drafts of rounds do not wait for prompts' states."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from outrider.features import FeatureOrder, FeatureRows, FeatureSpec, FeatureWindow
from outrider.params import SamplingParams
from outrider.rpc.feature_codec import SessionMessage, response_to_bytes
from outrider.types import Request
from outrider.v1 import draft_pb2
from scorer_service.drafting import outbox
from scorer_service.drafting.outbox import Outbox
from scorer_service.sessions import Session

SPEC = FeatureSpec(2**19, final_norm=True)  # a row of 1 MiB
ORDER = FeatureOrder(1, SPEC, FeatureWindow(), FeatureWindow())


def make_session(session_id: int) -> Session:
    return Session(
        request=Request(session_id, (1, 2, 3), SamplingParams(temperature=0.0)),
        traceparent="",
        max_len=100,
        num_speculative_tokens=3,
        committed=[1, 2, 3],
        num_draft_tokens=3,
        epoch=1,
    )


def make_rows(session: Session, start: int, count: int, *, of_prompt: bool) -> FeatureRows:
    rows = b"".join(bytes([start + i]) * SPEC.row_bytes for i in range(count))
    return FeatureRows(session.id, ORDER, start, rows, of_prompt)


async def take(box: Outbox) -> draft_pb2.SessionBatch:
    async with asyncio.timeout(20):
        message = await box.take()
    return draft_pb2.DraftResponse.FromString(response_to_bytes(message)).sessions


def positions(batch: draft_pb2.SessionBatch) -> list[tuple[int, int, int]]:
    """(session, first position, position after the last), by what the rows hold."""
    found = []
    for each in batch.features:
        count = len(each.rows) // SPEC.row_bytes
        held = [each.rows[i * SPEC.row_bytes] for i in range(count)]
        assert held == [*range(each.start, each.start + count)]
        found.append((each.session, each.start, each.start + count))
    return found


def opened(sessions: Sequence[Session]) -> Outbox:
    box = Outbox(10_000, ("eagle",))
    for session in sessions:
        box.open(session)
    return box


async def test_outbox_with_rows_of_rounds_and_prompts_sends_rounds_first() -> None:
    new, old = make_session(1), make_session(2)
    box = opened([new, old])
    assert len((await take(box)).opens) == 2
    box.features(make_rows(new, 0, 5, of_prompt=True))
    box.features(make_rows(old, 3, 1, of_prompt=False))
    assert 2 * SPEC.row_bytes == outbox._PROMPT_BYTES
    assert positions(await take(box)) == [(1, 0, 2)]  # it was their turn
    assert box.taken_feature_bytes == {ORDER.prompts: 2 * SPEC.row_bytes}
    assert positions(await take(box)) == [(2, 3, 4)]
    assert box.taken_feature_bytes == {ORDER.window: SPEC.row_bytes}
    box.features(make_rows(old, 4, 1, of_prompt=False))
    # In turns, so that neither waits for ever.
    assert [positions(await take(box)) for _ in range(3)] == [[(1, 2, 4)], [(2, 4, 5)], [(1, 4, 5)]]


async def test_outbox_with_several_rows_of_a_session_keeps_their_order() -> None:
    session = make_session(1)
    box = opened([session])
    await take(box)
    box.features(make_rows(session, 0, 3, of_prompt=True))
    box.features(make_rows(session, 3, 1, of_prompt=False))  # what was left of the prompt
    assert positions(await take(box)) == [(1, 0, 2)]
    assert positions(await take(box)) == [(1, 2, 3), (1, 3, 4)]
    box.features(make_rows(session, 4, 1, of_prompt=False))
    box.features(make_rows(make_session(2), 0, 3, of_prompt=True))
    assert positions(await take(box)) == [(1, 4, 5)]
    assert positions(await take(box)) == [(2, 0, 2)]


async def test_outbox_with_a_new_session_opens_it_before_its_rows() -> None:
    """Also if it was the turn of prompts: rows of an unknown session would be lost."""
    first, second = make_session(1), make_session(2)
    box = opened([first])
    await take(box)
    box.open(second)
    box.features(make_rows(second, 0, 1, of_prompt=True))
    assert [each.session for each in (await take(box)).opens] == [2]
    assert positions(await take(box)) == [(2, 0, 1)]


def test_outbox_message_with_rows_equals_what_protobuf_writes() -> None:
    batch = draft_pb2.SessionBatch(step_us=300)
    batch.commits.add(session=7, epoch=2, base_len=9, tokens=[1, 2])
    rows = [
        FeatureRows(7, replace(ORDER, epoch=2), 8, b""),
        FeatureRows(2**40, ORDER, 0, memoryview(b"ab" * 100_000)),
    ]
    expected = draft_pb2.DraftResponse()
    expected.sessions.CopyFrom(batch)
    for each in rows:
        expected.sessions.features.add(
            session=each.session_id,
            epoch=each.order.epoch,
            start=each.start,
            rows=bytes(each.rows),
        )
    written = response_to_bytes(SessionMessage(batch, rows))
    assert draft_pb2.DraftResponse.FromString(written) == expected
    welcome = draft_pb2.DraftResponse(welcome=draft_pb2.Welcome(vocab_size=5))
    assert response_to_bytes(welcome) == welcome.SerializeToString()
