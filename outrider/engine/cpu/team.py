"""Run compiled kernels on the calling thread, or on torch's own OpenMP threads.

A second pool of threads would compete with torch's for the cores.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from numba import types
from numba.core.ccallback import CFunc
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engine.cpu.cache import keep
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


class _Thread(threading.local):
    calls: list[Callable[[], None]] | None = None  # that it records


_thread = _Thread()


class Kernel:
    """A compiled kernel for one dtype, for one calling thread at a time."""

    def __init__(self, entry: Callable[..., None], layout: str, dtype: torch.dtype) -> None:
        """Compile `entry`; `layout` is the arguments' types as in `struct`, q or d."""
        self._compiled = _compile(entry, _ELEMENTS[dtype])
        self._packing = struct.Struct("qq" + layout)
        self._arguments = ctypes.create_string_buffer(self._packing.size)
        self._pack = self._packing.pack_into
        self._at = ctypes.addressof(self._arguments)
        self._address = self._compiled.address
        # Holds the interpreter lock, because short runs would lose more by waiting for it again.
        self._run_alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._openmp = _openmp()

    def __call__(self, team: bool, items: int, *arguments: float) -> None:
        """Run all items, on torch's threads if `team`; or record that, within a `Recording`."""
        if _thread.calls is not None:
            _thread.calls.append(self._bound(team, items, *arguments))
            return
        self._pack(self._arguments, 0, 0, items, *arguments)
        self._run(team, self._at)

    def _run(self, team: bool, at: int) -> None:
        if team and self._openmp is not None:
            self._openmp(self._address, at, torch.get_num_threads(), 0)
        else:
            self._run_alone(at)

    def _bound(self, team: bool, items: int, *arguments: float) -> Callable[[], None]:
        memory = ctypes.create_string_buffer(self._packing.size)
        self._pack(memory, 0, 0, items, *arguments)
        taken, at, run = ctypes.c_int64.from_buffer(memory), ctypes.addressof(memory), self._run

        def call() -> None:
            taken.value = 0
            run(team, at)

        return call


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernels that are called within it, to run them again over the same tensors.

    What else computes within it is refused, since it would not run again. Tensors that are made
    within it stay.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Callable[[], None]] = []
        self._kept: list[Any] = []

    def __enter__(self) -> Recording:
        super().__enter__()  # type: ignore[no-untyped-call]
        _thread.calls = self._calls
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _thread.calls = None
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func in _MAKES or func.is_view
        assert made, f"{func} cannot be recorded"
        self._kept.append(func(*args, **(kwargs or {})))
        return self._kept[-1]

    def run(self) -> None:
        """Run the kernels in their order."""
        for call in self._calls:
            call()


_MAKES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


@lru_cache
def _compile(entry: Callable[[Any], None], element: Any) -> Any:
    began = time.perf_counter()
    compiled = CFunc(entry, ((Arguments(element),), types.void), locals={}, options=OPTIONS)
    keep(compiled, entry)
    compiled.compile()
    took = time.perf_counter() - began
    if took > _NOTEWORTHY_S:
        logger.info("Compiled %s for this CPU in %.1f s.", entry.__name__, took)
    return compiled
