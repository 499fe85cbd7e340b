"""What flags may say: each reads a word of the command line, or tells what is wrong with it."""

from __future__ import annotations

import argparse

from outrider.flag_numbers import number, whole
from outrider.methods import parse_methods


def methods(text: str) -> tuple[str, ...]:
    """Nothing for "none"."""
    return () if text.strip() == "none" else parse_methods(text)


def some_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return utf8(text)


def utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # what was no UTF-8 on the command line
        raise argparse.ArgumentTypeError("is not UTF-8 text") from error
    return text


def address(text: str) -> str:
    """As the ready line of `outrider up` has it, or host and port alone."""
    if text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is HTTP: give the gateway's grpc:// address, as its ready line has it"
        )
    return text.removeprefix("grpc://").rstrip("/")


def key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("holds a character that no header can")
    return text


def temperature(text: str) -> float:
    value = number(text)
    if not 0.0 <= value <= 2.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value


def seconds(text: str) -> float:
    value = number(text)
    if not 0.0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def port(text: str) -> int:
    return whole(text, 0, 65535)


def positive(text: str) -> int:
    return whole(text, 1)


def top_k(text: str) -> int:
    return whole(text, 0)


def seed(text: str) -> int:
    return whole(text, 0, 2**64 - 1)


def speculative_tokens(text: str) -> int:
    return whole(text, 0, 128)
