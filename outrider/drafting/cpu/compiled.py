"""Functions compiled by Numba, kept between processes where a folder can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def compiled(function: _Kernel, **options: Any) -> _Kernel:
    """Compile at the first call with Numba's `options`; the GIL is free while it runs."""
    try:
        kernel: _Kernel = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no folder can be written, so every process compiles anew
        kernel = njit(nogil=True, **options)(function)
    return kernel
