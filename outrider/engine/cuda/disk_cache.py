"""Keep findings of a start beside Triton's compiled kernels for later starts.

An entry counts for the same device, libraries and kernels alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


def read(file: str, key: Iterable[object]) -> str | None:
    """Return what was kept under a key; None if nothing was, or nothing can be read."""
    from triton.runtime.cache import get_cache_manager  # here, since only CUDA brings it

    try:
        path = get_cache_manager(_hash(key)).get_file(file)
        return None if path is None else Path(path).read_text()
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning("What an earlier start kept in %s cannot be read: %s", file, error)
        return None


def keep(file: str, key: Iterable[object], text: str) -> None:
    """Keep a text for later starts, at once or, without a writable folder, not at all."""
    from triton.runtime.cache import get_cache_manager

    try:
        get_cache_manager(_hash(key)).put(text, file, binary=False)
    except (OSError, RuntimeError) as error:
        logger.warning("Later starts take as long as this one, without %s: %s", file, error)


def _hash(key: Iterable[object]) -> str:
    import triton

    device = torch.cuda.get_device_properties()
    parts = [
        *(device.name, device.multi_processor_count, torch.version.cuda),
        *(torch.__version__, triton.__version__, _sources()),
        *key,
    ]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


@cache
def _sources() -> str:
    """Return a hash of the kernels, and of how they are launched and chosen."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".cu"):
            found.update(path.read_bytes())
    return found.hexdigest()
