"""`speculative_config`, as the methods that it asks for."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("method", METHODS)
def test_speculation_of_no_tokens_is_none_by_any_method(method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 0}
    assert read_speculation(config, "embedded", "cpu") == Speculation()
    with pytest.raises(ConfigError, match="num_speculative_tokens above 0"):
        read_speculation({**config, "synthetic_acceptance_length": 2.0}, "embedded", "cpu")
