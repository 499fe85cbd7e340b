"""What an engine refuses before it starts on a request."""

from __future__ import annotations

import pytest

from outrider.errors import InvalidRequestError, PromptTooLongError
from outrider.params import Advice, SamplingParams, SpeculationParams
from outrider.types import EngineInfo, Request

INFO = EngineInfo(
    vocab_size=10,
    max_model_len=8,
    eos_token_ids=frozenset({1}),
    page_size=4,
    num_pages=4,
    max_num_seqs=2,
    max_waiting=2,
    num_speculative_tokens=4,
    adapters=("sql",),
)


def test_engine_info_check_of_a_known_adapter_passes() -> None:
    INFO.check(Request(1, (3,), adapter="sql"))


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (Request(1, (3, 10)), "prompt"),
        (Request(1, (3,), SamplingParams(logit_bias=((10, 1.0),))), "logit_bias"),
        (Request(1, (3,), speculation=SpeculationParams(advice=Advice((3, 10)))), "advice"),
        (
            Request(
                1, (3,), speculation=SpeculationParams(advice=Advice(references=((3,), (10,))))
            ),
            "advice",
        ),
        (Request(1, (3,), adapter="unknown"), "model"),
    ],
)
def test_engine_info_check_of_unknown_tokens_refuses(request_: Request, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        INFO.check(request_)
    assert caught.value.param == param


def test_engine_info_check_of_a_full_context_refuses() -> None:
    with pytest.raises(PromptTooLongError):
        INFO.check(Request(1, (3,) * 8))


def test_engine_info_check_of_what_fits_accepts() -> None:
    advice = Advice((9, 0), references=((), (9,)))
    sampling = SamplingParams(logit_bias=((9, 1.0),))
    INFO.check(Request(1, (9,) * 7, sampling, speculation=SpeculationParams(advice=advice)))
