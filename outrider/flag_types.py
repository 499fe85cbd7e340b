"""Types of flags: each reads a word of the command line, or says what is wrong with it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from outrider.errors import ConfigError
from outrider.methods import parse_methods
from outrider.params import MAX_SPECULATIVE_TOKENS

DEFAULT_HTTP_PORT = 8000
DEFAULT_GRPC_PORT = 50051
MAX_SOCKET_PATH = 97
"""Bytes: the system allows 107, and sockets beside it add ".vllm" and ".data"."""
_MOST = 2**31 - 1
_FloatType = Callable[[str], float]


class RaisingParser(argparse.ArgumentParser):
    """Raises `ConfigError`, a line, where other parsers print their usage and end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _number(low: float, high: float, about: str, *, open_low: bool = False) -> _FloatType:
    """Return what reads a number from `low` to `high`, or above `low`; errors say `about`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan  # which no bounds include
        if not low <= value <= high or (open_low and value == low):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {about}")
        return value

    return read


temperature = _number(0.0, 2.0, "from 0 to 2")
seconds = _number(0.0, 1e9, "of seconds above 0", open_low=True)
from_zero = _number(0.0, sys.float_info.max, "from 0")
part = _number(0.0, 1.0, "above 0 and at most 1", open_low=True)


def rates(text: str) -> tuple[float, ...]:
    """Read numbers between commas, also in brackets; `check_acceptance_rates` bounds them."""
    parts = text.strip().removeprefix("[").removesuffix("]").split(",")
    try:
        return tuple(map(float, parts))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers, such as 0.9,0.6"
        ) from None


def whole(text: str, low: int, high: int = _MOST) -> int:
    """Raise `ArgumentTypeError` for what is no whole number within these bounds."""
    is_number = text.isascii() and text.isdigit() and len(text) < 1000  # what `int` reads
    if not (is_number and low <= int(text) <= high):
        bounds = f"of at least {low}, at most {high}" if high == _MOST else f"from {low} to {high}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
    return int(text)


positive = partial(whole, low=1)
whole_number = partial(whole, low=0)
seed = partial(whole, low=0, high=2**64 - 1)
speculative_tokens = partial(whole, low=0, high=MAX_SPECULATIVE_TOKENS)


def methods(text: str) -> tuple[str, ...]:
    """Read a comma list of methods; "none" is empty."""
    return () if text.strip() == "none" else parse_methods(text)


def some_text(text: str) -> str:
    """Read text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return utf8(text)


def utf8(text: str) -> str:
    """Read text that is valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # what was no UTF-8 on the command line
        raise argparse.ArgumentTypeError("is not UTF-8 text") from error
    return text


def address(text: str) -> str:
    """Read a gateway's gRPC address: grpc://host:port or host:port."""
    if text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is HTTP: give the gateway's grpc:// address, as its ready line has it"
        )
    return text.removeprefix("grpc://").rstrip("/")


def key(text: str) -> str:
    """Read an API key that fits a header."""
    if not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("holds a character that no header can")
    return text


def port(text: str) -> int:
    """Read a port from 0 (any free one) to 65535; gRPC would wrap greater numbers."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def device(text: str) -> str:
    """Read a device: cpu, cuda or, with a number, cuda:1."""
    kind, _, index = text.partition(":")
    if text != "cpu" and not (kind == "cuda" and (index.isdecimal() or text == kind)):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or, say, cuda:1")
    return text
