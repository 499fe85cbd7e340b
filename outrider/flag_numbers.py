"""Numbers that flags say."""

from __future__ import annotations

import argparse
import math


def number(text: str) -> float:
    """Read a number; other text is NaN, which no bounds include."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def rates(text: str) -> tuple[float, ...]:
    """Read numbers between commas, also in brackets; `check_acceptance_rates` bounds them."""
    parts = text.strip().removeprefix("[").removesuffix("]").split(",")
    try:
        return tuple(map(float, parts))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers, such as 0.9,0.6"
        ) from None


def whole(text: str, low: int, high: int = 2**31 - 1) -> int:
    """Raise `ArgumentTypeError` for what is no whole number within these bounds."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
    return value
