"""Why one of vLLM's processes ended while it started: vLLM says that in its log alone."""

from __future__ import annotations

import contextlib
import os
import re
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
_DRAIN_S: Final = 2.0


class StartLog:
    """Passes on this process's standard error and that of its children, and looks for errors."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._copier: threading.Thread | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read what is written within, and what children started within write until they end."""
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
        while chunk := os.read(source, 65_536):
            os.write(kept, chunk)
            *lines, begun = (begun + chunk).split(b"\n")
            for line in lines if self._reason is None else ():
                if found := _RAISED.search(line):
                    name, text = found.groups()
                    told = text if name in _PLAIN else name + b": " + text
                    self._reason = told.decode(errors="replace").rstrip()
                    break
        os.close(source)
        os.close(kept)
