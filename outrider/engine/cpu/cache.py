"""Keep what Numba compiles between processes, several of which may compile at once."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, import-untyped, misc"

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

logger = logging.getLogger(__name__)


def keep(kernel: Any, function: Callable[..., Any]) -> None:
    """Load and save what `kernel` compiles of `function`, if a folder can be written.

    `kernel` is Numba's `Dispatcher` or `CFunc`, and has compiled nothing yet.
    """
    with suppress(RuntimeError):  # no folder can be written, so every process compiles anew
        kernel._cache = _Cache(function)


class _Cache(FunctionCache):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Files(
            self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )

    def load_overload(self, *signature):
        """Return the compiled code of a signature; None if there is none that can be read."""
        try:
            return super().load_overload(*signature)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            logger.warning("Could not read compiled code in %s: %s", self._cache_path, error)
            return None

    def save_overload(self, *compiled):
        """Keep compiled code if that is possible."""
        try:
            super().save_overload(*compiled)
        except (OSError, EOFError, pickle.UnpicklingError) as error:  # a full disk, say
            logger.warning("Could not keep compiled code in %s: %s", self._cache_path, error)


class _Files(IndexDataCacheFile):
    """Gives each signature a data file of its own, and an index entry only after it is written.

    Numba numbers them in the order in which they are found. Of two processes that compile two
    signatures at once, each takes the same number, and code for one type is then loaded for the
    other. At worst an entry of the index gets lost here, so that a signature is compiled again.
    """

    def save(self, key, data):
        name = self._data_name(int(hashlib.sha256(repr(key).encode()).hexdigest()[:16], 16))
        self._save_data(name, data)
        try:
            known = self._load_index()
        except (EOFError, pickle.UnpicklingError):  # damaged: what it named is compiled again
            known = {}
        self._save_index({**known, key: name})
