"""`speculative_config`, as the methods that it asks for."""

from __future__ import annotations

import pytest

from outrider.drafting.building.config import SuffixConfig
from outrider.offline.speculation import read_speculation


@pytest.mark.parametrize("shared", [True, False])
def test_speculation_with_a_boolean_setting_takes_it(shared: bool) -> None:
    config = {"method": "suffix", "shared_memory_across_tenants": shared}
    [method], *_ = read_speculation(config, "embedded", "cpu")
    assert isinstance(method, SuffixConfig)
    assert method.settings.shared_across_tenants is shared
