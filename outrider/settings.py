"""Settings whose flags follow from the fields of a frozen configuration, each described once."""

from __future__ import annotations

import argparse
from dataclasses import Field, field, fields
from typing import Any


def setting(
    default: Any, about: str, /, *, unset: bool = False, resolved: bool = False, **flag: Any
) -> Any:
    """Declare a field with a flag of its name; `flag` are more arguments of `add_argument`.

    The flag is called `flag`, if given, as the field otherwise. With `unset` it has no default: the
    field's own holds. With `resolved` the field has none, since the flag's is resolved first.
    """
    flag |= {"help": about, "type": flag.get("type", str if default is None else type(default))}
    options = {"default": None if unset else default, **flag}
    return field(metadata=options) if resolved else field(default=default, metadata=options)


def seconds(default: float | None, about: str, flag: str) -> Any:
    """Declare a `setting` in seconds."""
    return setting(default, about, flag=flag, type=float, metavar="SECONDS")


def settings_of(config: type) -> list[Field[Any]]:
    """Return the fields of a dataclass that are settings."""
    return [each for each in fields(config) if "help" in each.metadata]


def add_flag(parser: argparse.ArgumentParser, each: Field[Any]) -> None:
    """Add the flag of a setting."""
    options = dict(each.metadata)
    name = options.pop("flag", each.name)
    if "action" in options:
        del options["type"]
    elif options["type"] is bool:
        del options["type"]
        options["action"] = argparse.BooleanOptionalAction
    parser.add_argument(f"--{name.replace('_', '-')}", dest=each.name, **options)
