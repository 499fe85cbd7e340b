"""Stop strings: the same result however the text is cut, and nothing leaks past a match."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output import OutputAssembler, OutputToken
from gateway.stop_strings import StopStringMatcher
from outrider.models.detokenizer import ByteLevelDetokenizer, byte_alphabet
from outrider.types import TokenKind

STOP = st.text(alphabet="ab", min_size=1, max_size=6)  # two letters: ends often begin it again
TEXT = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(STOP, max_size=4)


class Pieces:
    """A detokeniser whose token n is the n-th piece; a piece "?" is a character still incomplete,
    as is every "~" at the end of a piece until the next one comes.
    """

    parts = ()

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces
        self._held = ""

    def push(self, token_id: int) -> str:
        text = self._held + self._pieces[token_id]
        whole = text.rstrip("~")
        self._held = text[len(whole) :]
        return whole

    def push_whole(self, token_ids: Sequence[int]) -> list[str] | None:
        texts = [self._pieces[token_id] for token_id in token_ids]
        whole = not self._held and not any(text.endswith("~") for text in texts)
        return texts if whole else None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    @property
    def complete(self) -> bool:
        return not self._held


def search(text: str, stops: list[str], start: int = 0) -> str:
    """The definition: cut before the stop string that ends first, the longest of those."""
    found = [(text.find(stop, start), stop) for stop in stops if text.find(stop, start) >= 0]
    if not found:
        return text
    _, begin = min((begin + len(stop), begin) for begin, stop in found)
    return text[:begin]


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def run(
    pieces: list[str], stops: list[str], min_tokens: int = 0
) -> tuple[list[list[OutputToken]], OutputAssembler]:
    assembler = OutputAssembler(Pieces(pieces), stops, min_tokens)
    chunks = []
    for number in range(len(pieces)):
        chunks.append(assembler.push([number], [TokenKind.PLAIN]))
        if assembler.stopped:
            break
    chunks.append(assembler.finish())
    return chunks, assembler


def text_of(chunks: list[list[OutputToken]]) -> str:
    return "".join(token.text for chunk in chunks for token in chunk)


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=12))
def test_stop_strings_in_any_segmentation_equal_whole_search(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    chunks, _ = run(cut(text, cuts), stops)
    assert text_of(chunks) == search(text, stops)


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=12))
def test_stop_strings_when_matched_emit_earlier_tokens_in_order(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    pieces = [piece for piece in cut(text, cuts) if piece]
    chunks, assembler = run(pieces, stops)
    tokens = [token for chunk in chunks for token in chunk]
    assert [token.id for token in tokens] == list(range(len(tokens)))
    assert assembler.released == len(tokens)
    kept = len(search(text, stops))
    if assembler.stopped:
        begins = [sum(map(len, pieces[:n])) for n in range(len(pieces))]
        assert len(tokens) == sum(begin < kept for begin in begins)
    else:
        assert len(tokens) == len(pieces)


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=12))
def test_stop_strings_in_any_text_never_retract_nor_delay_it_too_long(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    pieces = cut(text, cuts)
    assembler = OutputAssembler(Pieces(pieces), stops)
    shown, fed = "", ""
    for number, piece in enumerate(pieces):
        fed += piece
        shown += "".join(token.text for token in assembler.push([number], [TokenKind.PLAIN]))
        assert search(text, stops).startswith(shown)
        if assembler.stopped:
            break
        begins_a_stop = [
            n for n in range(len(fed) + 1) if any(stop.startswith(fed[n:]) for stop in stops)
        ]
        safe = min(begins_a_stop, default=len(fed))
        assert len(shown) > safe - max(map(len, pieces)) - 1


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=12), n=st.integers(0, 8))
def test_stop_strings_before_min_tokens_are_ignored(
    text: str, stops: list[str], cuts: list[int], n: int
) -> None:
    pieces = cut(text, cuts)
    chunks, assembler = run(pieces, stops, min_tokens=n)
    assert text_of(chunks) == search(text, stops, start=len("".join(pieces[:n])))
    assert assembler.released >= min(n, len(pieces))


def test_stop_strings_with_incomplete_last_character_keep_it_in_its_token() -> None:
    chunks, _ = run(["ab", "c~", "~"], ["x"])
    emitted = [[(token.id, token.text) for token in chunk] for chunk in chunks]
    assert emitted == [[(0, "ab")], [], [], [(1, "c"), (2, "~~")]]


def test_stop_strings_completed_by_the_flush_end_the_text() -> None:
    chunks, assembler = run(["ab", "c~"], ["c~"])
    assert text_of(chunks) == "ab"
    assert assembler.stopped


def test_stop_strings_when_not_given_delay_no_text() -> None:
    chunks, _ = run(["a", "b", "c"], [])
    assert [len(chunk) for chunk in chunks] == [1, 1, 1, 0]


@given(text=TEXT, stop=STOP)
def test_stop_strings_pending_is_the_longest_end_that_begins_one(text: str, stop: str) -> None:
    matcher = StopStringMatcher([stop])
    if stop in text:
        return
    assert matcher.feed(text) is None
    ends = [n for n in range(len(stop)) if text.endswith(stop[:n])]
    assert matcher.pending == max(ends)


def test_stop_strings_in_the_flush_before_min_tokens_are_ignored() -> None:
    kept, assembler = run(["ab", "c~"], ["~"], min_tokens=2)
    assert (text_of(kept), assembler.stopped) == ("abc~", False)
    cut_off, assembler = run(["ab", "c~"], ["~"], min_tokens=1)
    assert (text_of(cut_off), assembler.stopped) == ("abc", True)


SPELLED = "<|user|>"


CHAR_OF = {byte: char for char, byte in byte_alphabet().items()}


def bytes_to_token(data: bytes) -> str:
    return "".join(CHAR_OF[byte] for byte in data)


@st.composite
def byte_tokens(draw: st.DrawFn) -> list[bytes | None]:
    """Tokens of a text cut between any two bytes, with special tokens (None) between characters."""
    tokens: list[bytes | None] = []
    for part in draw(st.lists(st.text(alphabet="ab日本", max_size=8), max_size=4)):
        data = part.encode()
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=10)))
        bounds = [0, *(c for c in cuts if c < len(data)), len(data)]
        tokens += [data[a:b] for a, b in pairwise(bounds) if a < b]
        tokens.append(None)
    return tokens[:-1]


def reference(tokens: list[bytes | None], stops: list[str], *, spelled: bool) -> list[int] | None:
    """The tokens that begin before the first stop string, by decoding everything at each token."""
    texts = [token or (SPELLED.encode() if spelled else b"") for token in tokens]
    for end in range(1, len(tokens) + 1):
        text = b"".join(texts[:end]).decode(errors="ignore")
        cut_text = search(text, stops)
        if cut_text != text or any(text.endswith(stop) for stop in stops):
            kept, at, size = [], 0, len(cut_text.encode())
            whole = b"".join(texts)
            for index in range(end):
                begin = at
                while begin and 0x80 <= whole[begin] < 0xC0 and texts[index]:
                    begin -= 1  # the character's first byte
                if begin < size or (not texts[index] and at <= size):
                    kept.append(index)
                at += len(texts[index])
            return kept
    return None


@given(
    tokens=byte_tokens(),
    stops=st.lists(st.text(alphabet="ab日本", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_output_of_characters_in_several_tokens_drops_whole_characters(
    tokens: list[bytes | None], stops: list[str]
) -> None:
    expected = reference(tokens, stops, spelled=False)
    names = {index: bytes_to_token(token) for index, token in enumerate(tokens) if token}
    assembler = OutputAssembler(ByteLevelDetokenizer(names.get, lambda _: ""), stops)
    kept: list[OutputToken] = []
    for index in range(len(tokens)):
        kept += assembler.push([index], [TokenKind.PLAIN])
        if assembler.stopped:
            break
    kept += assembler.finish()
    assert [token.id for token in kept] == (
        list(range(len(tokens))) if expected is None else expected
    )
    assert assembler.stopped == (expected is not None)
    assert assembler.released == len(kept)


@pytest.mark.parametrize(
    ("stop", "kept", "text"),
    [
        ("<|user|>", 2, "ab"),
        ("b<|user|>", 1, "a"),
        ("<|user|>c", 2, "ab"),
        ("user|>c", 4, "abcd"),
        ("bc", 1, "a"),
    ],
)
def test_output_with_special_tokens_in_a_stop_string_stops_at_them(
    stop: str, kept: int, text: str
) -> None:
    """The text is "ab", a special token, "cd"; a stop string without the token sees "abcd"."""
    pieces = {0: "a", 1: "b", 3: "c", 4: "d"}
    spelled = SPELLED in stop
    assembler = OutputAssembler(
        ByteLevelDetokenizer(pieces.get, lambda _: ""),
        () if spelled else (stop,),
        spelled_stops=(stop,) if spelled else (),
        spell_special=lambda token: SPELLED if token == 2 else "",
    )
    tokens: list[OutputToken] = []
    for token in range(5):
        tokens += assembler.push([token], [TokenKind.PLAIN])
        if assembler.stopped:
            break
    tokens += assembler.finish()
    assert "".join(token.text for token in tokens) == text
    assert len(tokens) == (5 if text == "abcd" else kept)
