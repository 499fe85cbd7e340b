"""outrider/rpc/codec.py: defaults, round trips and refusals."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft_tree import MAX_DRAFT_PROBS, DraftProbs
from outrider.errors import InvalidRequestError
from outrider.params import (
    REQUEST_RULES,
    Advice,
    Constraint,
    ConstraintKind,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
    VerificationRule,
)
from outrider.rpc import codec
from outrider.types import FinishReason, MethodCounts, RequestStats, TokenKind, TokenLogprobs
from outrider.v1 import common_pb2, draft_pb2

UNIT = st.floats(0, 1, width=32)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(2**-16, 2, width=32),
    top_k=st.integers(0, 2**31 - 1),
    top_p=UNIT.filter(lambda value: value > 0),
    min_p=UNIT,
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    repetition_penalty=st.floats(0, 10, width=32, exclude_min=True),
    logit_bias=st.dictionaries(
        st.integers(0, 2**32 - 1), st.floats(-100, 100, width=32), max_size=8
    ).map(lambda biases: tuple(biases.items())),
)
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple)
VERIFICATION = st.builds(
    Verification,
    rule=st.sampled_from(REQUEST_RULES),
    epsilon=UNIT.filter(lambda value: value > 0),
    alpha=UNIT.filter(lambda value: value > 0),
    max_candidate_len=st.integers(1, 256),
    verify_window=st.integers(1, 128),
)
ADVICE = st.integers(1, 64).flatmap(
    lambda least: st.builds(
        Advice,
        token_ids=TOKEN_IDS,
        edit=st.booleans(),
        min_token_match=st.just(least),
        max_token_match=st.integers(least, 64),
        references=st.lists(TOKEN_IDS, max_size=3).map(tuple),
    )
)
SPECULATION = st.builds(
    SpeculationParams,
    enabled=st.booleans(),
    methods=st.lists(st.sampled_from(codec.METHODS), unique=True).map(tuple),
    num_speculative_tokens=st.none() | st.integers(0, 128),
    verification=VERIFICATION,
    advice=ADVICE,
)


@given(SAMPLING)
def test_codec_with_sampling_round_trips(params: SamplingParams) -> None:
    wire = codec.sampling_to_proto(params).SerializeToString()
    assert codec.sampling_from_proto(common_pb2.SamplingParams.FromString(wire), seed=1) == params


@given(SPECULATION)
def test_codec_with_speculation_round_trips(params: SpeculationParams) -> None:
    wire = codec.speculation_to_proto(params).SerializeToString()
    assert codec.speculation_from_proto(common_pb2.SpeculationParams.FromString(wire)) == params


@given(
    st.integers(1, 2**31 - 1).flatmap(
        lambda most: st.builds(
            StopParams,
            max_tokens=st.just(most),
            stop_token_ids=st.frozensets(st.integers(0, 2**32 - 1)),
            ignore_eos=st.booleans(),
            min_tokens=st.integers(0, most),
        )
    )
)
def test_codec_with_stop_round_trips(params: StopParams) -> None:
    wire = codec.stop_to_proto(params).SerializeToString()
    message = common_pb2.StopParams.FromString(wire)
    assert codec.stop_from_proto(message, default_max_tokens=7) == params


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45])
def test_codec_with_tiny_temperature_takes_it_for_greedy(temperature: float) -> None:
    message = common_pb2.SamplingParams(temperature=temperature)
    assert codec.sampling_from_proto(message, seed=1).greedy


def test_codec_with_unset_or_zero_field_keeps_them_distinct() -> None:
    unset = codec.sampling_from_proto(common_pb2.SamplingParams(), seed=9)
    assert unset == SamplingParams(seed=9)
    zero = codec.sampling_from_proto(common_pb2.SamplingParams(temperature=0, seed=0), seed=9)
    assert zero == SamplingParams(temperature=0, seed=0)
    stop = codec.stop_from_proto(common_pb2.StopParams(), default_max_tokens=5)
    assert stop == StopParams(max_tokens=5)
    assert codec.speculation_from_proto(common_pb2.SpeculationParams()) == SpeculationParams()


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (common_pb2.SamplingParams(temperature=-0.5), "temperature"),
        (common_pb2.SamplingParams(temperature=float("nan")), "temperature"),
        (common_pb2.SamplingParams(top_k=2**31), "top_k"),
        (common_pb2.SamplingParams(top_p=0), "top_p"),
        (common_pb2.SamplingParams(min_p=1.5), "min_p"),
        (common_pb2.SamplingParams(presence_penalty=2.5), "presence_penalty"),
        (common_pb2.SamplingParams(frequency_penalty=-3), "frequency_penalty"),
        (common_pb2.SamplingParams(repetition_penalty=0), "repetition_penalty"),
        (
            common_pb2.SamplingParams(logit_bias=[common_pb2.LogitBias(token_id=1, bias=101)]),
            "logit_bias",
        ),
        (
            common_pb2.SamplingParams(logit_bias=[common_pb2.LogitBias(token_id=1)] * 2),
            "logit_bias",
        ),
    ],
)
def test_codec_with_value_out_of_range_names_the_field(
    message: common_pb2.SamplingParams, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.sampling_from_proto(message, seed=0)
    assert caught.value.param == param


def test_codec_with_impossible_stop_or_speculation_refuses() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.stop_from_proto(common_pb2.StopParams(max_tokens=0), default_max_tokens=1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequestError) as caught:
        codec.speculation_from_proto(common_pb2.SpeculationParams(num_speculative_tokens=129))
    assert caught.value.param == "num_speculative_tokens"


def test_codec_with_unknown_verification_rule_refuses() -> None:
    unknown = common_pb2.Verification(rule=99)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        codec.speculation_from_proto(common_pb2.SpeculationParams(verification=unknown))
    assert caught.value.param == "verification"


def test_codec_with_method_names_resolves_them() -> None:
    def resolve(method: str) -> SpeculationParams:
        return codec.speculation_from_proto(common_pb2.SpeculationParams(method=method))

    assert resolve("inference_with_reference").methods == ("ngram",)
    assert resolve("none") == SpeculationParams(enabled=False)
    assert resolve("ngram") == SpeculationParams(methods=("ngram",))
    with pytest.raises(InvalidRequestError, match="draft_model, medusa") as caught:
        resolve("telepathy")
    assert caught.value.param == "method"


def test_codec_with_several_methods_keeps_their_order() -> None:
    def resolve(*methods: str, method: str | None = None) -> SpeculationParams:
        return codec.speculation_from_proto(
            common_pb2.SpeculationParams(methods=methods, method=method)
        )

    assert resolve("suffix", "draft_model").methods == ("suffix", "draft_model")
    assert resolve("none") == SpeculationParams(enabled=False)
    for bad in (("ngram", "none"), ("ngram", "inference_with_reference"), ("ngram", "magic")):
        with pytest.raises(InvalidRequestError) as caught:
            resolve(*bad)
        assert caught.value.param == "methods"
    with pytest.raises(InvalidRequestError, match="not both"):
        resolve("ngram", method="ngram")


@pytest.mark.parametrize("kind", ConstraintKind)
def test_codec_with_constraint_round_trips(kind: ConstraintKind) -> None:
    constraint = Constraint(kind, "" if kind is ConstraintKind.JSON_OBJECT else "{}")
    message = codec.constraint_to_proto(constraint)
    assert message is not None
    assert codec.constraint_from_proto(message) == constraint


def test_codec_with_empty_constraint_refuses() -> None:
    assert codec.constraint_to_proto(None) is None
    assert codec.constraint_from_proto(common_pb2.Constraint()) is None
    with pytest.raises(InvalidRequestError) as caught:
        codec.constraint_from_proto(common_pb2.Constraint(regex=""))
    assert caught.value.param == "regex"


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), UNIT), max_size=MAX_DRAFT_PROBS))
def test_codec_with_draft_probs_round_trips(pairs: list[tuple[int, float]]) -> None:
    probs = DraftProbs(tuple(token for token, _ in pairs), tuple(prob for _, prob in pairs))
    wire = codec.draft_probs_to_proto(probs).SerializeToString()
    assert codec.draft_probs_from_proto(draft_pb2.DraftProbs.FromString(wire)) == probs


def test_codec_with_a_point_mass_encodes_nothing() -> None:
    assert codec.draft_probs_to_proto(None) == draft_pb2.DraftProbs()


@pytest.mark.parametrize(
    ("num_ids", "num_bytes"),
    [(MAX_DRAFT_PROBS + 1, 4), (1, 4 * MAX_DRAFT_PROBS + 4), (1, 3), (1, 5)],
)
def test_codec_with_oversized_draft_probs_does_not_convert_them(
    num_ids: int, num_bytes: int
) -> None:
    message = draft_pb2.DraftProbs(token_ids=[1] * num_ids, probs=bytes(num_bytes))
    with pytest.raises(InvalidRequestError) as caught:
        codec.draft_probs_from_proto(message)
    assert caught.value.param == "draft_probs"


def test_codec_with_logprobs_round_trips() -> None:
    logprobs = TokenLogprobs(-0.5, ((7, -0.5), (3, -1.25)))
    assert codec.logprobs_from_proto(codec.logprobs_to_proto(logprobs)) == logprobs


def test_codec_with_any_enum_value_maps_it() -> None:
    assert set(codec.KIND_TO_PROTO) == set(TokenKind)
    assert set(codec.KIND_FROM_PROTO) == set(common_pb2.TokenKind.values()) - {0}
    assert set(codec.FINISH_TO_PROTO) == set(FinishReason)
    assert set(codec.FINISH_FROM_PROTO) == set(common_pb2.FinishReason.values()) - {0}


def test_codec_with_aux_info_carries_every_statistic() -> None:
    values: dict[str, object] = {}
    for i, field in enumerate(dataclasses.fields(RequestStats), start=1):
        values[field.name] = (str(i),) if field.name == "proposer_ids" else i
    values["accepted_per_pos"], values["k_histogram"] = (3, 2), (1, 0, 4)
    values["drafts_per_context"], values["accepted_per_context"] = (2, 1), (3, 0)
    values["by_method"] = (MethodCounts("ngram", 5, 3),)
    values["verification"] = VerificationRule.REJECTION
    stats = RequestStats(**values)  # type: ignore[arg-type]
    info = codec.aux_info(stats, cost_time_ms=12.5, scorer_id="s")
    renamed = {"output_tokens": "output_len", "prompt_tokens": None}
    for field in dataclasses.fields(RequestStats):
        name = renamed.get(field.name, field.name)
        if name is not None:
            ours, theirs = getattr(stats, field.name), getattr(info, name)
            match name:
                case "verification":
                    assert (theirs, info.exact) == (ours.value, ours.exact)
                case "by_method":
                    assert [(c.method, c.drafted, c.accepted) for c in theirs] == list(ours)
                case _:
                    assert (tuple(theirs) if isinstance(ours, tuple) else theirs) == ours, name
    assert info.avg_tokens_per_iter == stats.output_tokens / stats.iter_count
    assert (info.cost_time, info.scorer_id) == (12.5, "s")
    unset = [
        f.name
        for f in info.DESCRIPTOR.fields
        if f.name not in {d.name for d, _ in info.ListFields()}
    ]
    assert unset == ["retries"], "which the gateway counts"
    assert codec.usage(stats).prompt_tokens == stats.prompt_tokens
