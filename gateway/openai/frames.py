"""Make events that differ in their text alone without encoding JSON for each."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Final, NamedTuple

_MARK: Final = "\uffff"  # no character: it stands nowhere else


class TextFrame(NamedTuple):
    """The parts of an event before and behind its text."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, event: bytes) -> TextFrame:
        """Take an event whose text is `TextFrame.mark()`."""
        before, _, after = event.partition(json.dumps(_MARK).encode())
        return cls(before, after)

    @staticmethod
    def mark() -> str:
        """Return the text to make an event of."""
        return _MARK

    def event(self, text: str) -> bytes:
        """Return the event with this text: the same bytes as `json.dumps` would make."""
        return b"%b%b%b" % (self.before, encode_basestring_ascii(text).encode(), self.after)
