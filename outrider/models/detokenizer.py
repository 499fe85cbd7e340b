"""Incremental detokenisation that never emits half a character.

The pieces of a completion, with the flush at its end, join to exactly `decode(all tokens)`; the
cost per token does not grow with the text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns one completion's tokens into text, one by one."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` made certain; empty while a character is incomplete."""

    def push_whole(self, token_ids: Sequence[int]) -> list[str] | None:
        """Push tokens that are text by themselves, and return their texts.

        None, with nothing pushed, unless it is known that all are.
        """

    def flush(self) -> str:
        """Return the text that was held back; broken bytes become U+FFFD."""

    @property
    def complete(self) -> bool:
        """Nothing is held back, so `flush` would return nothing."""

    @property
    def parts(self) -> Sequence[str | None]:
        """The text last returned, by token, where it was held back for several; else empty.

        None stands for tokens that decode to nothing.
        """


_ONLY_TEXT = {str}


class ByteLevelDetokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen, ...): a token is a string of bytes.

    An incremental UTF-8 decoder over the bytes is exact, whatever the bytes are. `pieces` are what
    tokens stand for, as far as they were met: text, or bytes if they are no text by themselves.
    """

    parts: Sequence[str | None] = ()  # a token has the characters that it completes

    def __init__(
        self,
        token: Callable[[int], str | None],
        _decode: Callable[[list[int]], str],
        pieces: dict[int, str | bytes] | None = None,
    ) -> None:
        self._token = token
        self._pieces = {} if pieces is None else pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.complete = True

    def push(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        if isinstance(piece, str):
            if self.complete:
                return piece
            piece = piece.encode()
        text = self._utf8.decode(piece)
        self.complete = not self._utf8.getstate()[0]
        return text

    def push_whole(self, token_ids: Sequence[int]) -> list[str] | None:
        get = self._pieces.get
        texts = [get(token_id) for token_id in token_ids]
        known = self.complete and set(map(type, texts)) == _ONLY_TEXT
        return texts if known else None  # type: ignore[return-value]

    def flush(self) -> str:
        self.complete = True
        return self._utf8.decode(b"", final=True)

    def _piece(self, token_id: int) -> str | bytes:
        token = self._token(token_id)
        spelled = b"" if token is None else byte_level_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return spelled


class WindowDetokenizer:
    """Any other decoder (SentencePiece, WordPiece, ...), through windows of tokens.

    The text of a token depends on its neighbours (leading spaces, runs of byte tokens). So it is
    the difference between decoding the previous window with it and without it, as in vLLM and
    TGI. A run of byte tokens is valid or not as a whole: nothing of it is certain before it ends.
    """

    def __init__(
        self, token: Callable[[int], str | None], decode: Callable[[list[int]], str]
    ) -> None:
        self._token = token
        self._decode = decode
        self._context: list[int] = []  # already emitted; decoding starts here
        self._pending: list[int] = []
        self._held: list[str] = []  # the tokens since text was last returned, as they are spelled
        self.parts: Sequence[str | None] = ()

    def push(self, token_id: int) -> str:
        token = self._token(token_id)
        self._held.append(token or "")
        if token is None:  # decodes to nothing, and must not become the start of a window
            if not self._pending:
                self._held.clear()
            return ""
        self._pending.append(token_id)
        return "" if BYTE_TOKEN.fullmatch(token) else self._emit()

    def push_whole(self, token_ids: Sequence[int]) -> None:
        """Return None: the text of a token depends on those before it."""

    def flush(self) -> str:
        return self._emit(last=True) if self._pending else ""

    @property
    def complete(self) -> bool:
        return not self._pending

    def _emit(self, *, last: bool = False) -> str:
        before = self._decode(self._context) if self._context else ""
        piece = self._decode(self._context + self._pending)[len(before) :]
        if piece.endswith("\ufffd") and not last:
            return ""  # perhaps the first bytes of a character
        if piece:
            self._context, self._pending = self._pending, []
            self.parts, self._held = _by_token(self._held, piece), []
        return piece


def _by_token(tokens: Sequence[str], text: str) -> Sequence[str | None]:
    """Share `text` out among the byte tokens and the token that it is made of; () if unknown.

    A character belongs to the token of its last byte. Tokens before the bytes gave no text when
    they came.
    """
    silent = next((i for i, token in enumerate(tokens) if BYTE_TOKEN.fullmatch(token)), 0)
    tokens = tokens[silent:]
    run = [token for token in tokens[:-1] if token]
    last_is_byte = BYTE_TOKEN.fullmatch(tokens[-1]) is not None
    run += [tokens[-1]] if last_is_byte else []
    if len(tokens) < 2 or not all(map(BYTE_TOKEN.fullmatch, run)):
        return ()
    values = [bytes.fromhex(token[3:5]) for token in run]
    try:
        b"".join(values).decode()
    except UnicodeDecodeError:
        shares = ["\ufffd"] * len(run)  # a run is valid or not as a whole
    else:
        utf8 = codecs.getincrementaldecoder("utf-8")()
        shares = [utf8.decode(value) for value in values]
    rest = text.removeprefix("".join(shares))
    if len(rest) + sum(map(len, shares)) != len(text) or (last_is_byte and rest):
        return ()
    of_run = iter(shares)
    parts = [next(of_run) if token else None for token in tokens[:-1]]
    return [*parts, next(of_run) if last_is_byte else rest]


BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for bytes.

    Printable Latin-1 characters stand for themselves; the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + n): byte for n, byte in enumerate(others)},
    }


_BYTE_OF = byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Return a token's bytes; an added token with other characters is taken literally."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()
