"""Prompts with a suffix, in the tokens of each family of code models."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from gateway.fill_in_middle import encode_infill
from outrider.errors import InvalidRequestError
from outrider.models.tokenizer import Tokenizer
from tests.support.models.tokenizers import byte_level_bpe, save, sentencepiece_bpe

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|endoftext|>"]
STARCODER = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|endoftext|>"]
DEEPSEEK = ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"]
LLAMA = ["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"]
CODESTRAL = ["[PREFIX]", "[SUFFIX]"]
PREFIX, SUFFIX = "a b", "ab b"


def made(backend: Backend, marks: list[str], folder: Path, *, special: bool = False) -> Tokenizer:
    add = backend.add_special_tokens if special else backend.add_tokens
    add([AddedToken(mark, normalized=False) for mark in marks])
    return Tokenizer.load(save(backend, folder))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("marks", "layout", "ends"),
    [
        (QWEN, "<|fim_prefix|>a b<|fim_suffix|>ab b<|fim_middle|>", QWEN[3:]),
        (STARCODER, "<fim_prefix>a b<fim_suffix>ab b<fim_middle>", STARCODER[3:]),
        (DEEPSEEK, "<｜fim▁begin｜>a b<｜fim▁hole｜>ab b<｜fim▁end｜>", []),
        (CODESTRAL, "[SUFFIX]ab b[PREFIX]a b", []),
    ],
)
def test_prompt_with_suffix_has_the_layout_of_its_family(
    marks: list[str], layout: str, ends: list[str], special: bool, tmp_path: Path
) -> None:
    tokenizer = made(byte_level_bpe(), marks, tmp_path, special=special)
    ids, stops = encode_infill(tokenizer, PREFIX, SUFFIX, "prompt")
    assert ids == tokenizer.encode(layout)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<s>{layout}"
    assert stops == {tokenizer.token_id(end) for end in ends}


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (LLAMA, ["▁<PRE>", "▁a", "▁", "b", "▁<SUF>", "ab", "▁", "b", "▁<MID>"]),
        (CODESTRAL, ["[SUFFIX]", "ab", "▁", "b", "[PREFIX]", "▁a", "▁", "b"]),
    ],
)
def test_suffix_of_sentencepiece_models_begins_without_a_space(
    marks: list[str], expected: list[str], tmp_path: Path
) -> None:
    tokenizer = made(sentencepiece_bpe(), marks, tmp_path)
    ids, stops = encode_infill(tokenizer, PREFIX, SUFFIX, "prompt")
    assert [*map(tokenizer.spell, ids)] == expected
    assert [*map(tokenizer.spell, stops)] == ["▁<EOT>"] * (marks is LLAMA)


def test_empty_prefix_is_a_prompt(tmp_path: Path) -> None:
    tokenizer = made(sentencepiece_bpe(), LLAMA, tmp_path)
    ids, _ = encode_infill(tokenizer, "", SUFFIX, "prompt")
    assert [*map(tokenizer.spell, ids)][:2] == ["▁<PRE>", "▁<SUF>"]


@pytest.mark.parametrize("marks", [[], QWEN[:2], ["[SUFFIX]"], LLAMA[:2]])
def test_tokenizer_without_all_the_tokens_is_refused(marks: list[str], tmp_path: Path) -> None:
    tokenizer = made(byte_level_bpe(), marks, tmp_path)
    with pytest.raises(InvalidRequestError, match="suffix is not supported") as caught:
        encode_infill(tokenizer, PREFIX, SUFFIX, "prompt")
    assert caught.value.param == "suffix"
