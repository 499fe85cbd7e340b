"""Functions compiled by Numba, kept between processes where a folder can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

from outrider.engine.cpu.cache import keep

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def compiled(function: _Kernel, **options: Any) -> _Kernel:
    """Compile at the first call with Numba's `options`; the GIL is free while it runs."""
    kernel: _Kernel = njit(nogil=True, **options)(function)
    keep(kernel, function)
    return kernel
