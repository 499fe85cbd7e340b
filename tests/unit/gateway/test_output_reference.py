"""Stop strings over tokenizers of every kind equal cutting the text that is decoded at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output import OutputAssembler, OutputToken
from outrider.models.tokenizer import Tokenizer
from outrider.types import TokenKind, TokenLogprobs
from tests.support.models.tokenizers import byte_level_bpe, sentencepiece_bpe, word_piece

KINDS = {"byte level": byte_level_bpe, "sentencepiece": sentencepiece_bpe, "word piece": word_piece}
SPECIAL = {"byte level": "</s>", "sentencepiece": "</s>", "word piece": "[CLS]"}
PART = st.text(alphabet="ab .日本é🐎", max_size=6) | st.sampled_from(
    ["the quick", "quicker.", "don't"]
)


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), chat_template=None, content_hash="")


@dataclass(frozen=True, slots=True)
class Output:
    """What a client gets."""

    text: str
    tokens: list[int]
    logprobs: int  # entries
    stopped: bool


def reference(of: Tokenizer, token_ids: list[int], stops: list[str], min_tokens: int) -> Output:
    """Decode everything, and cut before the stop string that ends first."""
    text = of.decode(token_ids)
    special = [bool(of.spell_special(token)) for token in token_ids]
    begins = [_begin(of, token_ids[:i], text) for i in range(len(token_ids))]
    detokenizer = of.detokenizer()
    start = len("".join(map(detokenizer.push, token_ids[:min_tokens])))
    if min_tokens >= len(token_ids):
        start = len(text)
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    if not found:
        return Output(text, token_ids, len(token_ids), stopped=False)
    cut = min(found)[1]
    before = (begin < cut + is_special for begin, is_special in zip(begins, special, strict=True))
    kept = [token for token, _ in zip(token_ids, takewhile(bool, before), strict=False)]
    return Output(text[:cut], kept, len(kept), stopped=True)


def _begin(of: Tokenizer, token_ids: list[int], text: str) -> int:
    """Return where the next token's character begins in the text."""
    texts = (of.decode(token_ids[:end]).rstrip("\ufffd") for end in range(len(token_ids) + 1))
    return max(len(before) for before in texts if text.startswith(before))


def assembled(of: Tokenizer, token_ids: list[int], stops: list[str], min_tokens: int) -> Output:
    assembler = OutputAssembler(of.detokenizer(), stops, min_tokens)
    kept: list[OutputToken] = []
    at_once = 1 + len(token_ids) % 3  # tokens of a message
    for start in range(0, len(token_ids), at_once):
        message = token_ids[start : start + at_once]
        logprobs = [TokenLogprobs(-1.0, ())] * len(message)
        kept += assembler.push(message, _plain(message), logprobs)
        if assembler.stopped:
            break
    kept += assembler.finish()
    assert assembler.released == len(kept)
    return Output(
        "".join(token.text for token in kept),
        [token.id for token in kept],
        sum(token.logprobs is not None for token in kept),
        assembler.stopped,
    )


@st.composite
def cases(draw: st.DrawFn, kind: str) -> tuple[list[int], list[str], int]:
    of = tokenizer(kind)
    special = of.encode(SPECIAL[kind], add_special_tokens=False)
    token_ids: list[int] = []
    for part in draw(st.lists(PART, min_size=1, max_size=4)):
        token_ids += of.encode(part, add_special_tokens=False)
        token_ids += draw(st.sampled_from([[], special]))
    text = of.decode(token_ids)
    cuts = st.integers(0, max(0, len(text) - 1))
    stops = [text[at : at + draw(st.integers(1, 4))] for at in draw(st.lists(cuts, max_size=3))]
    stops += draw(st.lists(st.text(alphabet="ab 日", min_size=1, max_size=3), max_size=2))
    return token_ids, [stop for stop in stops if stop], draw(st.sampled_from([0, 0, 2, 5]))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_output_of_any_tokenizer_equals_cutting_the_whole_text(
    kind: str, data: st.DataObject
) -> None:
    token_ids, stops, min_tokens = data.draw(cases(kind))
    of = tokenizer(kind)
    expected = reference(of, token_ids, stops, min_tokens)
    assert assembled(of, token_ids, stops, min_tokens) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_marks_of_a_format_stay_in_the_text_and_other_special_tokens_do_not(
    kind: str, data: st.DataObject
) -> None:
    of = tokenizer(kind)
    mark = SPECIAL[kind]
    texts = data.draw(st.lists(st.text(alphabet="ab .", min_size=1, max_size=5), max_size=4))
    runs = [of.encode(text, add_special_tokens=False) for text in texts]
    ((mark_id, _),) = of.special_ids([mark, "<absent>"]).items()
    token_ids = [token for run in runs for token in (*run, mark_id)]
    hidden = OutputAssembler(of.detokenizer(), ())
    shown = OutputAssembler(of.detokenizer(), (), shown={mark_id: mark})
    texts_of = [
        "".join(
            [
                token.text
                for part in (output.push(token_ids, _plain(token_ids)), output.finish())
                for token in part
            ]
        )
        for output in (hidden, shown)
    ]
    assert texts_of[0] == texts_of[1].replace(mark, "")
    assert texts_of[1].count(mark) == len(runs)


def test_mark_within_a_character_ends_it() -> None:
    of = tokenizer("byte level")
    (mark_id,) = of.special_ids(["</s>"])
    horse = of.encode("🐎", add_special_tokens=False)
    output = OutputAssembler(of.detokenizer(), ("zz",), shown={mark_id: "</s>"})
    token_ids = [horse[0], mark_id, *of.encode("ab", add_special_tokens=False)]
    tokens = output.push(token_ids, _plain(token_ids))
    tokens += output.finish()
    assert len(horse) > 1
    assert "".join([token.text for token in tokens]) == "\ufffd</s>ab"


def _plain(token_ids: list[int]) -> list[TokenKind]:
    return [TokenKind.PLAIN] * len(token_ids)
