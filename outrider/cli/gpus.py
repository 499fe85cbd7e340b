"""The GPUs of this machine, without torch."""

from __future__ import annotations

import ctypes
from importlib.metadata import version


def count_gpus() -> int:
    """Return the number of CUDA devices that this process may use, asking the driver alone."""
    if "+cpu" in version("torch"):
        return 0  # this torch cannot use them
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):  # no driver
        return 0
    return 0 if failed else count.value
