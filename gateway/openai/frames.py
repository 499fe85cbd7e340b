"""Events that differ in their text alone, without JSON's work for each."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Final, NamedTuple

_MARK: Final = "\uffff"  # no character: it stands nowhere else


class TextFrame(NamedTuple):
    """What is before and behind the text of an event."""

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
