"""Why one of vLLM's processes ended while it started: vLLM says that in its log alone."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
from collections.abc import Iterator
from typing import Final

_RAISED: Final = re.compile(
    rb"\bERROR \S+ \S+ \[[^\]]+\] (?:\w+\.)*(\w*(?:Error|Exception)): *(\S.*)"
)
"""The last line of a traceback as vLLM's logger writes it."""
_PLAIN: Final = frozenset({b"ValueError", b"RuntimeError", b"NotImplementedError", b"ConfigError"})
"""Errors whose text says enough without their name."""
_LINE_END: Final = re.compile(rb"[\r\n]")
"""Progress bars end their lines with a carriage return."""
_LINE_BYTES: Final = 8_192
"""What is looked at of a line."""
_DRAIN_S: Final = 2.0
_WRITE_S: Final = 1.0
"""How long standard error may stand still before what it does not take is given up."""


class StartLog:
    """Passes on this process's standard error and that of its children, and looks for errors."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._looking = True
        self._copier: threading.Thread | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read what is written within, and what children started within write until they end.

        Children keep the pipe, so that their text is passed on after a start that succeeded too;
        nothing is looked for in it then.
        """
        sys.stderr.flush()
        source, inherited = os.pipe()
        kept = os.dup(2)
        os.dup2(inherited, 2)
        os.close(inherited)
        self._copier = threading.Thread(
            target=self._copy, args=(source, kept), name="start-log", daemon=True
        )
        self._copier.start()
        try:
            yield
            self._looking = False
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)

    def reason(self) -> str | None:
        """Return what the first error said, once the children have ended; None without any.

        Those after it follow from it.
        """
        if self._copier is not None:
            self._copier.join(_DRAIN_S)
        return self._reason

    def _copy(self, source: int, kept: int) -> None:
        begun = b""
        try:
            while chunk := os.read(source, 65_536):
                if self._looking:
                    *lines, begun = _LINE_END.split(begun + chunk)
                    begun = begun[:_LINE_BYTES]
                    self._look(lines)
                _pass_on(chunk, kept)
        finally:
            os.close(source)
            os.close(kept)

    def _look(self, lines: list[bytes]) -> None:
        for line in lines:
            if found := _RAISED.search(line[:_LINE_BYTES]):
                name, text = found.groups()
                told = text if name in _PLAIN else name + b": " + text
                self._reason = told.decode(errors="replace").rstrip()
                self._looking = False
                break


def _pass_on(chunk: bytes, kept: int) -> None:
    """Write `chunk`, but lose what cannot be written: else the children would wait for ever.

    A pipe that is ready takes `PIPE_BUF` bytes without blocking.
    """
    ready = select.poll()
    ready.register(kept, select.POLLOUT)
    left = memoryview(chunk)
    with contextlib.suppress(OSError):  # a full disk, a reader that is gone
        while left and ready.poll(_WRITE_S * 1000):
            left = left[os.write(kept, left[: select.PIPE_BUF]) :]
