"""Tokens to text, one by one: never half a character, and joined exactly decode's text."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from outrider.models.tokenizer import Tokenizer
from tests.support.models.tokenizers import byte_level_bpe, save, sentencepiece_bpe, word_piece

KINDS: dict[str, Callable[[], BackendTokenizer]] = {
    "byte_level": byte_level_bpe,
    "sentencepiece": sentencepiece_bpe,
    "word_piece": word_piece,
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(save(KINDS[kind](), Path(folder)))


def pieces(kind: str, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer(kind).detokenizer()
    pushed = [detokenizer.push(token_id) for token_id in token_ids]
    complete, flushed = detokenizer.complete, detokenizer.flush()
    assert not (complete and flushed), "nothing was held back"
    return [*pushed, flushed]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_detokenizer_pieces_of_random_tokens_join_to_decode(kind: str, data: st.DataObject) -> None:
    vocab_size = tokenizer(kind).vocab_size
    token_ids = data.draw(st.lists(st.integers(0, vocab_size + 3), max_size=40))
    assert "".join(pieces(kind, token_ids)) == tokenizer(kind).decode(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(text=st.text(max_size=60))
def test_detokenizer_pieces_of_text_are_whole_characters(kind: str, text: str) -> None:
    token_ids = tokenizer(kind).encode(text)
    got = pieces(kind, token_ids)
    assert "".join(got) == tokenizer(kind).decode(token_ids)
    if kind == "byte_level":
        assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


def test_detokenizer_of_any_utf_8_keeps_every_byte() -> None:
    places = (*range(0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x400))
    text = "".join(map(chr, places))
    token_ids = tokenizer("byte_level").encode(text, add_special_tokens=False)
    assert "".join(pieces("byte_level", token_ids)) == text
    assert b"".join(map(tokenizer("byte_level").token_bytes, token_ids)) == text.encode()


def test_detokenizer_with_a_split_character_waits_until_it_is_whole() -> None:
    detokenizer = tokenizer("byte_level").detokenizer()
    token_ids = tokenizer("byte_level").encode("🐎")[1:]
    assert len(token_ids) > 1
    assert [detokenizer.push(token_id) for token_id in token_ids] == [""] * (len(token_ids) - 1) + [
        "🐎"
    ]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_detokenizer_after_a_whole_word_is_complete(kind: str) -> None:
    detokenizer = tokenizer(kind).detokenizer()
    said = [detokenizer.push(token_id) for token_id in tokenizer(kind).encode("ab c")]
    assert "".join(said) == "ab c"
    assert detokenizer.complete


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_detokenizer_flush_replaces_an_unfinished_character(kind: str) -> None:
    token_ids = tokenizer(kind).encode("ab🐎")[:-1]
    *before, flushed = pieces(kind, token_ids)
    assert "\ufffd" not in "".join(before)
    assert "\ufffd" in flushed


def test_detokenizer_of_sentencepiece_keeps_inner_spaces() -> None:
    backend = tokenizer("sentencepiece")
    a, eos, spaced_a = backend.encode("a")[0], 2, backend.encode(" a")[-1]
    assert "".join(pieces("sentencepiece", [a, eos, eos, spaced_a])) == backend.decode(
        [a, eos, eos, spaced_a]
    )


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_detokenizer_of_long_text_keeps_its_windows_short(kind: str) -> None:
    """The cost per token must not grow with the text."""
    decoded: list[int] = []
    real = tokenizer(kind)
    detokenizer = type(real.detokenizer())(
        lambda token_id: real._token(token_id),
        lambda token_ids: decoded.append(len(token_ids)) or real.decode(token_ids),  # type: ignore[func-returns-value]
    )
    for token_id in real.encode("ab c. " * 300):
        detokenizer.push(token_id)
    assert max(decoded, default=0) <= 4


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(text=st.text(max_size=60))
def test_token_bytes_of_a_text_join_to_its_bytes(kind: str, text: str) -> None:
    real = tokenizer(kind)
    token_ids = real.encode(text, add_special_tokens=False)
    spelled = b"".join(map(real.token_bytes, token_ids))
    # SentencePiece puts a space before the first word, which only decoding takes away.
    decoded = spelled.decode(errors="replace")
    assert real.decode(token_ids) in (decoded, decoded.removeprefix(" "))


def test_token_bytes_of_special_unknown_and_byte_tokens_are_their_bytes() -> None:
    assert tokenizer("byte_level").token_bytes(1) == b"</s>"
    assert tokenizer("byte_level").token_bytes(10**6) == b""
    assert tokenizer("sentencepiece").token_bytes(3 + 0xF0) == b"\xf0"
    the, er = (tokenizer("word_piece").token_bytes(n) for n in (2, 4))
    assert (the, er) == (b" the", b"er")


VOCAB = (
    *("a", "b", "▁", "▁a", "##b", "##s", "c</w>", "d</w>", " ", "  x", "x ", "<0xE6>", "<0x97>"),
    *("<0xA5>", "<0x41>", "Ġ", "Ġa", "æ", "Ĺ", "¥", ".", ",", "'", "n't", " .", "|", "<pad>"),
    *("日", "é", "'s", "do"),
)
LLAMA = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "byte level in a sequence": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    "replace, byte level": decoders.Sequence([decoders.Replace("x", "y"), decoders.ByteLevel()]),
    "replace": decoders.Replace("▁", " "),
    "word piece": decoders.WordPiece(cleanup=False),
    "word piece, cleaned up": decoders.WordPiece(cleanup=True),
    "byte fallback": decoders.ByteFallback(),
    "fuse": decoders.Fuse(),
    "strip": decoders.Strip(" ", 1, 0),
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "bpe": decoders.BPEDecoder(suffix="</w>"),
    "ctc": decoders.CTC(),
    "llama": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(list(LLAMA)),
}


@cache
def with_decoder(name: str) -> Tokenizer:
    backend = BackendTokenizer(models.WordLevel({v: n for n, v in enumerate(VOCAB)}, "a"))
    if (decoder := DECODERS[name]) is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["日本", "<added>"])
    return Tokenizer(backend, chat_template=None, content_hash="")


@pytest.mark.parametrize("name", DECODERS)
@given(token_ids=st.lists(st.integers(0, len(VOCAB) + 4), max_size=12))
def test_detokenizer_of_any_decoder_joins_to_what_decoding_at_once_gives(
    name: str, token_ids: list[int]
) -> None:
    tokenizer = with_decoder(name)
    detokenizer = tokenizer.detokenizer()
    pushed = "".join(map(detokenizer.push, token_ids))
    assert pushed + detokenizer.flush() == tokenizer.decode(token_ids)
