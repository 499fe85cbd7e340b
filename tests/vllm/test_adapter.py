"""The names of vLLM that the plug-in touches are where it looks for them."""

from __future__ import annotations

import pytest

from outrider.vllm import adapter

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def test_adapter_finds_every_name_in_this_version() -> None:
    import vllm

    assert adapter.missing_names() == [], f"vLLM {vllm.__version__} moved them"
    assert vllm.__version__.startswith(adapter.SUPPORTED), "a version that was not tried"
