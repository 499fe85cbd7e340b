"""Requests as vLLM's sampling parameters, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.errors import InvalidRequestError, UnavailableError
from outrider.params import (
    Constraint,
    ConstraintKind,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
    VerificationRule,
)
from outrider.types import EngineInfo, Request
from outrider.vllm.params import Abilities, sampling_fields, structured_fields

INFO = EngineInfo(
    vocab_size=100,
    max_model_len=32,
    eos_token_ids=frozenset({2}),
    page_size=16,
    num_pages=8,
    max_num_seqs=4,
    max_waiting=4,
    num_speculative_tokens=0,
)
SAMPLED = SamplingParams(temperature=0.5, seed=2**64 - 1)
GREEDY = SamplingParams(temperature=0.0, seed=3)


def request(**fields: Any) -> Request:
    return Request(**{"session_id": 1, "prompt_token_ids": (5, 6, 7), "sampling": GREEDY, **fields})


def rule(name: str, *, required: bool = False) -> SpeculationParams:
    return SpeculationParams(verification=Verification(VerificationRule(name), required=required))


def test_fields_carry_sampling_and_bound_tokens_by_the_context() -> None:
    asked = request(sampling=SAMPLED, stop=StopParams(max_tokens=500, min_tokens=2))
    fields = sampling_fields(asked, INFO, Abilities())
    assert (fields["temperature"], fields["seed"]) == (0.5, 2**64 - 1)
    assert (fields["max_tokens"], fields["min_tokens"]) == (29, 2)
    assert sampling_fields(request(), INFO, Abilities())["seed"] is None


@pytest.mark.parametrize(("ignore_eos", "ends"), [(False, [2, 9]), (True, [9])])
def test_fields_name_every_token_that_ends_the_text(ignore_eos: bool, ends: list[int]) -> None:
    stop = StopParams(stop_token_ids=frozenset({9}), ignore_eos=ignore_eos)
    fields = sampling_fields(request(stop=stop), INFO, Abilities())
    assert (fields["stop_token_ids"], fields["ignore_eos"]) == (ends, True)


@pytest.mark.parametrize(
    ("kind", "source", "fields"),
    [
        ("regex", "a+", {"regex": "a+"}),
        ("grammar", "start: /a/", {"grammar": "start: /a/"}),
    ],
)
def test_constraint_of_each_kind_has_a_field(kind: str, source: str, fields: object) -> None:
    assert structured_fields(Constraint(ConstraintKind(kind), source)) == fields


def test_json_has_the_native_engines_white_space() -> None:
    for kind, source in (("json_object", ""), ("json_schema", '{"type": "object"}')):
        fields = structured_fields(Constraint(ConstraintKind(kind), source))
        schema = json.loads(fields["json"])
        assert schema["type"] == "object"
        assert schema["x-guidance"]["whitespace_pattern"]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
        ("json_schema", '{"const": "\\u0001"}'),
        ("grammar", "start: A\nA: /[a-c]+/ & /[d-f]+/"),
    ],
)
def test_constraint_without_end_is_refused_by_name(kind: str, source: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{kind} cannot be used") as caught:
        structured_fields(Constraint(ConstraintKind(kind), source))
    assert caught.value.param == kind


@pytest.mark.parametrize(
    ("speculation", "can"),
    [
        (rule("coupled", required=True), Abilities()),
        (rule("rejection"), Abilities(coupled=True)),
        (rule("typical"), Abilities()),
        (rule("top_p_window"), Abilities(coupled=True)),
    ],
)
def test_rule_that_the_engine_does_not_have_is_refused(
    speculation: SpeculationParams, can: Abilities
) -> None:
    with pytest.raises(InvalidRequestError, match="--engine native") as error:
        sampling_fields(request(sampling=SAMPLED, speculation=speculation), INFO, can)
    assert error.value.param == "verification"
    sampling_fields(request(speculation=speculation), INFO, can)  # greedy: all rules are the same


def test_rule_that_nobody_requires_becomes_the_engines() -> None:
    sampled, can = request(sampling=SAMPLED), Abilities()
    sampling_fields(sampled, INFO, can)
    assert can.rule(sampled) is VerificationRule.REJECTION
    assert can.rule(request()) is VerificationRule.COUPLED
    assert Abilities(coupled=True).rule(sampled) is VerificationRule.COUPLED


@pytest.mark.parametrize(
    ("param", "sampling"),
    [
        ("logit_bias", SamplingParams(temperature=0.0, logit_bias=((4, 1.0),))),
        ("min_p", SamplingParams(min_p=0.1)),
    ],
)
def test_sampling_that_excludes_speculation_is_refused_while_speculating(
    param: str, sampling: SamplingParams
) -> None:
    sampling_fields(request(sampling=sampling), INFO, Abilities())
    with pytest.raises(InvalidRequestError, match="--num-speculative-tokens 0") as error:
        sampling_fields(request(sampling=sampling), INFO, Abilities(num_speculative_tokens=4))
    assert error.value.param == param


@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationParams(enabled=False),
        SpeculationParams(num_speculative_tokens=2),
        SpeculationParams(methods=("ngram",)),
    ],
)
def test_change_of_vllms_own_speculation_is_refused(speculation: SpeculationParams) -> None:
    own = Abilities(num_speculative_tokens=4, own_method="eagle3")
    with pytest.raises(InvalidRequestError, match="vLLM's own eagle3 with 4") as error:
        sampling_fields(request(speculation=speculation), INFO, own)
    assert error.value.param == "speculation"
    same = SpeculationParams(methods=("eagle3",), num_speculative_tokens=4)
    sampling_fields(request(speculation=same), INFO, own)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("presence_penalty", {"sampling": SamplingParams(presence_penalty=1.0)}),
        ("frequency_penalty", {"sampling": SamplingParams(frequency_penalty=1.0)}),
        ("regex", {"constraint": Constraint(ConstraintKind.REGEX, "a")}),
    ],
)
def test_request_that_only_its_scorer_can_go_on_with_is_left_to_others(
    name: str, fields: dict[str, Any]
) -> None:
    sampling_fields(request(**fields), INFO, Abilities())
    with pytest.raises(UnavailableError, match=name):
        sampling_fields(request(**fields, num_resumed_tokens=1), INFO, Abilities())
