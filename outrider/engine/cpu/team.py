"""Run compiled kernels on the calling thread, or on torch's own OpenMP threads.

A second pool of threads would compete with torch's for the cores.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types

from outrider.engine.cpu.scalars import OPTIONS, Arguments

logger = logging.getLogger(__name__)

_NOTEWORTHY_S = 0.2
_ELEMENTS = {
    torch.bfloat16: types.uint16,
    torch.float32: types.float32,
    torch.float64: types.float64,
}


@lru_cache(maxsize=1)
def _openmp() -> Callable[[int, int, int, int], None] | None:
    """Return `GOMP_parallel(function, argument, threads, flags)` of torch's OpenMP library."""
    for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*"):
        try:
            parallel: Any = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel  # type: ignore[no-any-return]
    return None


class Kernel:
    """A compiled kernel for one dtype, for one calling thread at a time."""

    def __init__(self, entry: Callable[..., None], layout: str, dtype: torch.dtype) -> None:
        """Compile `entry`; `layout` is the arguments' types as in `struct`, q or d."""
        self._compiled = _compile(entry, _ELEMENTS[dtype])
        packing = struct.Struct("qq" + layout)
        self._arguments = ctypes.create_string_buffer(packing.size)
        self._pack = packing.pack_into
        self._at = ctypes.addressof(self._arguments)
        self._address = self._compiled.address
        # Holds the interpreter lock, because short runs would lose more by waiting for it again.
        self._run_alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._openmp = _openmp()

    def __call__(self, team: bool, items: int, *arguments: float) -> None:
        """Run all items, on torch's threads if `team`."""
        self._pack(self._arguments, 0, 0, items, *arguments)
        if team and self._openmp is not None:
            self._openmp(self._address, self._at, torch.get_num_threads(), 0)
        else:
            self._run_alone(self._at)


@lru_cache
def _compile(entry: Callable[[Any], None], element: Any) -> Any:
    began = time.perf_counter()
    signature = types.void(Arguments(element))
    try:
        compiled = cfunc(signature, cache=True, **OPTIONS)(entry)
    except RuntimeError:  # no folder for the cache is writable
        compiled = cfunc(signature, **OPTIONS)(entry)
    took = time.perf_counter() - began
    if took > _NOTEWORTHY_S:
        logger.info("Compiled %s for this CPU in %.1f s.", entry.__name__, took)
    return compiled
