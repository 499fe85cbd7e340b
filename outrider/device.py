"""Name the device of a process equally in all processes on that device.

It imports torch only for CUDA, because methods that copy tokens start without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def device_id(device: str) -> str:
    """Return a GPU's UUID, or the machine's boot id for a CPU; "" if it is unknown.

    Containers see the same names as their host.
    """
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_properties(device).uuid)
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return ""
