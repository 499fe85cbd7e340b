"""Adapters in vLLM's words."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.vllm.lora import Adapter, read_adapters


def test_adapters_are_read_in_both_of_vllms_forms() -> None:
    words = ("sql=/adapters/sql", '{"name": "org/chat", "path": "/a=b", "base_model_name": "m"}')
    assert read_adapters(words, enabled=True) == (
        Adapter("sql", "/adapters/sql"),
        Adapter("org/chat", "/a=b"),
    )
    assert read_adapters((), enabled=False) == ()


@pytest.mark.parametrize(
    ("words", "enabled", "said"),
    [
        (("sql",), True, "give NAME=PATH"),
        (("=x",), True, "give NAME=PATH"),
        (("sql=",), True, "give NAME=PATH"),
        (("{",), True, "give NAME=PATH"),
        (('{"name": "sql"}',), True, "give NAME=PATH"),
        (("sql=a", "sql=b"), True, "names 'sql' twice"),
        (("sql=a",), False, "needs --enable-lora"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(
    words: tuple[str, ...], enabled: bool, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_adapters(words, enabled=enabled)
