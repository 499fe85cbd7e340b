"""Chosen tilings, kept on disk beside Triton's compiled kernels, so that later starts measure none.

What was chosen counts for the same device, libraries, kernels and products alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
import triton
from triton.runtime.cache import get_cache_manager

from outrider.engine.cuda.gemm.linear import Kind
from outrider.engine.cuda.gemm.tilings import Tiling

logger = logging.getLogger(__name__)

_FILE = "tilings.json"
Choices = Mapping[tuple[Kind, int], Tiling | None]
"""Tilings by kind and by most rows; None is cuBLAS."""
Candidates = Mapping[tuple[Kind, int], Sequence[Tiling]]


def load(products: Iterable[Kind], candidates: Candidates) -> Choices | None:
    """Return what was kept for these products, one of the candidates each; None if nothing was.

    A file that cannot be read counts as none.
    """
    try:
        path = get_cache_manager(_key(products, candidates)).get_file(_FILE)
        if path is None:
            return None
        kept = json.loads(Path(path).read_bytes())
        known = {
            _name(place): {str(each): each for each in candidates[place]} for place in candidates
        }
        return {
            place: None if (name := kept[_name(place)]) is None else known[_name(place)][name]
            for place in candidates
        }
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        logger.warning("The tilings that an earlier start kept cannot be read: %r", error)
        return None


def keep(products: Iterable[Kind], candidates: Candidates, choices: Choices) -> None:
    """Keep choices for later starts, at once or not at all."""
    named = {_name(place): tiling and str(tiling) for place, tiling in choices.items()}
    try:
        get_cache_manager(_key(products, candidates)).put(json.dumps(named), _FILE, binary=False)
    except (OSError, RuntimeError) as error:  # there may be no writable folder
        logger.warning("The tilings cannot be kept for later starts: %s", error)


def _name(place: tuple[Kind, int]) -> str:
    kind, rows = place
    return f"{kind}, {rows} rows"


def _key(products: Iterable[Kind], candidates: Candidates) -> str:
    device = torch.cuda.get_device_properties()
    parts = [
        *(device.name, device.multi_processor_count, torch.version.cuda),
        *(torch.__version__, triton.__version__, _source()),
        *products,
        *candidates.values(),
    ]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


@cache
def _source() -> str:
    """Return a hash of the kernels and of how they are chosen."""
    found = hashlib.sha256()
    package = files("outrider.engine.cuda")
    for folder in (package / "gemm", package / "kernels"):
        for file in sorted(folder.iterdir(), key=lambda each: each.name):
            if file.name.endswith((".py", ".cu")):
                found.update(file.read_bytes())
    return found.hexdigest()
