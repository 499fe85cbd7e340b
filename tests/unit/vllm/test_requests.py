"""Fields of a request that reach the draft side through vLLM, and the plug-in's flags."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.errors import ConfigError, InvalidRequestError
from outrider.params import MAX_SPECULATIVE_TOKENS, Advice, SpeculationParams
from outrider.vllm import adapter
from outrider.vllm.draft_server import ServerOptions
from outrider.vllm.proposer import RemoteProposer
from outrider.vllm.requests import Extras


def test_extras_survive_their_way_through_extra_args() -> None:
    advice = Advice((1, 2), edit=True, min_token_match=3, max_token_match=5, references=((7,),))
    for speculation in (
        SpeculationParams(methods=("suffix",), num_speculative_tokens=3, advice=advice),
        SpeculationParams(),
    ):
        extras = Extras(speculation, tenant="t", traceparent="00-1-2-03")
        assert Extras.of(extras.to_args()) == extras
    assert not Extras.of(Extras(SpeculationParams(enabled=False)).to_args()).speculation.enabled


def test_extras_of_a_plain_client_are_read() -> None:
    extras = Extras.of({"outrider_methods": "suffix, inference_with_reference", "another": 1})
    assert extras.speculation == SpeculationParams(methods=("suffix", "ngram"))
    assert Extras.of(None) == Extras(SpeculationParams())
    assert not Extras.of({"outrider_num_speculative_tokens": 0}).speculation.enabled


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("methods", "sufix"),
        ("methods", [5]),
        ("methods", 5),
        ("num_speculative_tokens", "x"),
        ("num_speculative_tokens", float("inf")),
        ("advice", ["a"]),
        ("advice_match", [1, 2, 3]),
    ],
)
def test_wrong_extra_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"methods|outrider_"):
        Extras.of({f"outrider_{name}": value})


def test_flags_are_a_scorers() -> None:
    flags = "--port 7100 --health-port 80 --scorer-id s --drain-grace-seconds 3"
    options = ServerOptions.parse(flags, replica=2)
    assert (options.port, options.data_port, options.metrics_port) == (7104, 7006, 0)
    assert (options.scorer_id, options.deployment.drain_grace_s) == ("s", 3.0)
    assert options.deployment.health_port == 84


@pytest.mark.parametrize("flags", ["--prot 1", "--port x", "--tls-key missing", "--host 'a"])
def test_flags_that_are_wrong_are_refused_by_name(flags: str) -> None:
    with pytest.raises(ConfigError, match="--"):
        ServerOptions.parse(flags)


def test_more_draft_tokens_than_a_request_may_ask_for_end_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each request would be refused its drafts."""
    served = SimpleNamespace(num_speculative_tokens=MAX_SPECULATIVE_TOKENS + 1)
    monkeypatch.setattr(adapter, "read_config", lambda _: served)
    with pytest.raises(ConfigError, match="num_speculative_tokens is 128 at most"):
        RemoteProposer(None)


def test_seed_without_one_differs_by_request_and_not_by_process() -> None:
    assert adapter.seed_of("a", 7, 0) == 7
    assert adapter.seed_of("a", -1, 0) == 2**64 - 1
    assert adapter.seed_of("a", None, 0) == adapter.seed_of("a", None, 0)
    assert adapter.seed_of("a", None, 0) != adapter.seed_of("b", None, 0)


def test_runner_that_loads_the_drafter_is_found_by_it() -> None:
    class Drafter:
        def load_model(self) -> None:
            self.found = adapter.find_runner(self)

    class Runner:
        def __init__(self, drafter: Drafter) -> None:
            self.drafter = drafter

        def load_model(self) -> None:
            self.drafter.load_model()

    runner = Runner(Drafter())
    runner.load_model()
    assert runner.drafter.found is runner
    runner.drafter.load_model()
    assert runner.drafter.found is None
