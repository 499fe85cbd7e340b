"""JSON in pieces is the JSON that one call makes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.json_pieces import json_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)  # fmt: skip


@given(VALUES)
def test_pieces_are_together_what_one_call_makes(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert "".join(json_pieces(value)) == whole


@pytest.mark.parametrize("before", [[], [None]])  # nothing comes before a prompt's first token
def test_no_piece_holds_more_than_one_token(before: list[None]) -> None:
    top = [{"token": "word", "logprob": -1.5, "bytes": [119, 111, 114, 100]}] * 20
    entry = {"token": "word", "logprob": -1.5, "top_logprobs": top}
    entries = [*before, *[entry] * 5000]
    chat = {"choices": [{"logprobs": {"content": entries}}] * 3}
    output = [{"content": [{"type": "output_text", "logprobs": entries}]}]
    prompt = {"choices": [{"prompt_logprobs": [*before, *[{"7": entry, "8": entry}] * 5000]}]}
    for body in (chat, {"output": output}, prompt):
        assert max(map(len, json_pieces(body))) <= len(json.dumps(entry))


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_pieces({"choices": [{"logprob": float("nan")}]})
