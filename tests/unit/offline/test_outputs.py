"""What a reader is shown of a request's completions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.generation import Chunk, Ending
from gateway.openai.job import Job
from gateway.output import OutputToken
from outrider.models.tokenizer import Tokenizer
from outrider.offline.outputs import Tracker
from outrider.offline.params import RequestOutputKind
from outrider.params import StopParams
from outrider.types import FinishReason, TokenKind, TokenLogprobs
from outrider.v1.common_pb2 import AuxInfo, Usage

ENDING = Ending(FinishReason.LENGTH, None, Usage(), AuxInfo(output_len=2))


def chunk(token: int, ending: Ending | None = None) -> Chunk:
    logprobs = TokenLogprobs(-0.5, ())
    return Chunk((OutputToken(token, TokenKind.PLAIN, str(token), logprobs),), ending)


def tracker_of(choices: int, kind: RequestOutputKind) -> Tracker:
    work = [SimpleNamespace(prompt_token_ids=(1,), stop=StopParams())] * choices
    shaper = SimpleNamespace(n=choices, per_prompt=choices, with_logprobs=True, reading=None)
    tokenizer = SimpleNamespace(token_bytes=lambda token: str(token).encode())
    return Tracker(
        cast("Job", SimpleNamespace(scores_only=False, work=work, shaper=shaper)),
        cast("Tokenizer", tokenizer),
        request_id="r",
        prompt="x",
        kind=kind,
        index=0,
    )


def shown(tracker: Tracker) -> list[tuple[Any, ...]]:
    return [
        (each.index, each.text, each.cumulative_logprob, each.finish_reason)
        for each in tracker.take().outputs
    ]


def test_delta_of_several_choices_shows_each_piece_and_end_once() -> None:
    tracker = tracker_of(2, RequestOutputKind.DELTA)
    tracker.add(0, chunk(3))
    assert shown(tracker) == [(0, "3", -0.5, None)]
    tracker.add(0, chunk(4, ENDING))
    output = tracker.take()
    assert output.aux_info is ENDING.aux_info
    assert [each.cumulative_logprob for each in output.outputs] == [-1.0]
    tracker.add(1, chunk(5))
    assert shown(tracker) == [(1, "5", -0.5, None)]
    tracker.add(1, Chunk((), ENDING))
    last = tracker.take()
    assert last.finished
    assert last.aux_info is None
    assert [(each.index, each.finish_reason) for each in last.outputs] == [(1, "length")]
    assert last.outputs[0].cumulative_logprob == -0.5


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (RequestOutputKind.DELTA, [(1, "", -0.5, "abort")]),
        (RequestOutputKind.CUMULATIVE, [(0, "3", -0.5, "length"), (1, "5", -0.5, "abort")]),
    ],
)
def test_abort_ends_the_choices_that_go_on(
    kind: RequestOutputKind, expected: list[tuple[Any, ...]]
) -> None:
    tracker = tracker_of(2, kind)
    tracker.add(0, chunk(3, ENDING))
    tracker.add(1, chunk(5))
    tracker.take()
    tracker.abort()
    assert shown(tracker) == expected
