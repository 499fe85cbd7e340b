"""Begin what a start waits for, while Python still imports the libraries that use it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path

from outrider.models.resolve import find_local


def begin(model: str, device: str) -> None:
    """Have the weights of a model on this machine read, and make a CUDA device's context.

    Both run in the background and may fail: whoever needs them finds out.
    """
    folder = find_local(model, "target")
    if folder is not None:
        threading.Thread(target=_read_ahead, args=(folder,), daemon=True).start()
    kind, _, index = device.partition(":")
    if kind == "cuda" and (not index or index.isdecimal()):
        threading.Thread(target=_make_context, args=(int(index or 0),), daemon=True).start()


def _read_ahead(folder: Path) -> None:
    """Ask the system to bring all weights from the disk into its memory."""
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _make_context(index: int) -> None:
    """Make the device's primary context, which torch takes over."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with contextlib.suppress(OSError, AttributeError):  # no driver
        driver = ctypes.CDLL("libcuda.so.1")
        if not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
