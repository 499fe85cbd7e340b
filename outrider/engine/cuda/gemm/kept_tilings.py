"""Chosen tilings, kept on disk, so that later starts measure none."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

from outrider.engine.cuda import disk_cache
from outrider.engine.cuda.gemm.linear import Kind
from outrider.engine.cuda.gemm.tilings import Tiling

logger = logging.getLogger(__name__)

_FILE = "tilings.json"
Choices = Mapping[tuple[Kind, int], Tiling | None]
"""Tilings by kind and by most rows; None is cuBLAS."""
Candidates = Mapping[tuple[Kind, int], Sequence[Tiling]]


def load(products: Sequence[Kind], candidates: Candidates) -> Choices | None:
    """Return what was kept for these products, one of the candidates each; None if nothing was.

    A file that cannot be read counts as none.
    """
    text = disk_cache.read(_FILE, [*products, *candidates.values()])
    if text is None:
        return None
    try:
        kept = json.loads(text)
        known = {
            _name(place): {str(each): each for each in candidates[place]} for place in candidates
        }
        return {
            place: None if (name := kept[_name(place)]) is None else known[_name(place)][name]
            for place in candidates
        }
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("The tilings that an earlier start kept cannot be read: %r", error)
        return None


def keep(products: Sequence[Kind], candidates: Candidates, choices: Choices) -> None:
    """Keep choices for later starts, at once or not at all."""
    named = {_name(place): tiling and str(tiling) for place, tiling in choices.items()}
    disk_cache.keep(_FILE, [*products, *candidates.values()], json.dumps(named))


def _name(place: tuple[Kind, int]) -> str:
    kind, rows = place
    return f"{kind}, {rows} rows"
