"""The names of vLLM that the plug-in touches are where it looks for them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from outrider.vllm import versions

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def test_adapter_finds_every_name_in_this_version() -> None:
    import vllm

    assert versions.missing_names() == [], f"vLLM {vllm.__version__} moved them"
    assert versions.missing_names(versions.AHEAD) == [], "what --async-scheduling needs moved"
    assert versions.missing_names(versions.STATES) == [], "what --hidden-features needs moved"
    assert vllm.__version__.startswith(versions.SUPPORTED), "a version that was not tried"


def test_low_temperature_is_the_requests_own() -> None:
    """As in the native engine: vLLM raises it to 0.01."""
    from outrider.vllm.async_llm import stream

    class Engine:
        def generate(self, _: object, params: Any, **__: object) -> None:
            self.params = params

    engine = Engine()
    stream(cast("Any", engine), "a", [1], {"temperature": 0.001}, None, None)
    assert engine.params.temperature == 0.001
