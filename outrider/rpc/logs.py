"""A service's log on stderr: one line per record, whatever peers send."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Final

_FORMAT: Final = "%(levelname)s %(message)s"
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def configure_logging(name: str) -> None:
    """Log to stderr from now on, each line with the service's `name`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"{name} {_FORMAT}"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class LineFormatter(logging.Formatter):
    """Escapes what is not printable, and indents tracebacks.

    So no name, id or error message of a peer can begin a line that looks like another record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802
        lines = super().formatException(ei).splitlines()
        return "\n".join([f"  {_escaped(line)}" for line in lines])


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        [c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text]
    )
