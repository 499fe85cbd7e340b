"""`speculative_config`, as the methods that it asks for."""

from __future__ import annotations

import json

import pytest

from outrider.cli.translate import translate
from outrider.drafting.building.config import SuffixConfig
from outrider.errors import ConfigError
from outrider.methods import METHODS
from outrider.offline.speculation import Speculation, read_speculation


@pytest.mark.parametrize("shared", [True, False])
def test_speculation_with_a_boolean_setting_takes_it(shared: bool) -> None:
    config = {"method": "suffix", "shared_memory_across_tenants": shared}
    [method], *_ = read_speculation(config, "embedded", "cpu")
    assert isinstance(method, SuffixConfig)
    assert method.settings.shared_across_tenants is shared


def test_speculation_takes_settings_as_the_command_line_does() -> None:
    config: dict[str, object] = {"method": "ngram", "disable_logprobs": True}
    needless = {"tensor_parallel_size": 1, "use_heterogeneous_vocab": True}
    [method], *_ = read_speculation(config | needless, "embedded", "cpu")
    assert read_speculation({"method": "ngram"}, "embedded", "cpu").methods == (method,)
    words = ["m", f"--speculative-config={json.dumps(config | needless)}"]
    assert translate(words, {})[0] == ["m", "--method", "ngram"]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"rejection_sample_method": "typical"}, "rejection_sample_method typical: leave it out"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2: leave it out"),
    ],
)
def test_setting_that_cannot_be_taken_is_refused_by_name(
    setting: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--speculative-config: {told}"):
        read_speculation({"method": "ngram", **setting}, "embedded", "cpu")


@pytest.mark.parametrize("method", METHODS)
def test_speculation_of_no_tokens_is_none_by_any_method(method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 0}
    assert read_speculation(config, "embedded", "cpu") == Speculation()
    with pytest.raises(ConfigError, match="num_speculative_tokens above 0"):
        read_speculation({**config, "synthetic_acceptance_length": 2.0}, "embedded", "cpu")
