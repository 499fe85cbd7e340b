"""The device that a process computes on, by a name that all processes on that device have for it.

Imports torch only for CUDA: methods that copy tokens start without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def device_id(device: str) -> str:
    """Of "cuda" or, say, "cuda:1" the GPU's UUID, else the machine's boot id; "" if unknown.

    Containers see both as their host does.
    """
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_properties(device).uuid)
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return ""
