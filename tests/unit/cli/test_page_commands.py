"""Commands in README.md and docs/ have the flags that the services take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gateway.__main__ as gateway
import outrider.offline.batch as batch
import outrider.train.command_line as train
import proposer_service.__main__ as proposer
import scorer_service.__main__ as scorer
from outrider.cli import command_line
from outrider.errors import ConfigError

ROOT = Path(__file__).parents[3]
PARSERS: dict[str, Callable[[list[str]], object]] = {
    "scorer": lambda words: scorer.parser().parse_args(words),
    "proposer": proposer.parse,
    "gateway": lambda words: gateway._parser().parse_args(words),
    "batch": lambda words: batch._parser().parse_args(words),
    "train": lambda words: train.build_parser().parse_args(words),
}


def _commands() -> Iterator[str]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            yield from re.findall(r"^outrider .*", block.replace("\\\n", ""), re.MULTILINE)


COMMANDS = sorted(set(_commands()))


def _parse(command: str) -> None:
    words = shlex.split(command.removesuffix(" &"), comments=True)[1:]
    if "--" in words:  # the rest is vLLM's
        words = words[: words.index("--")]
    if words[0] in PARSERS:
        PARSERS[words[0]](words[1:])
    else:
        command_line.build_parser().parse_args(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_a_page_is_taken(command: str) -> None:
    _parse(command)


def test_commands_with_wrong_flags_would_be_found() -> None:
    assert len(COMMANDS) > 30
    with pytest.raises(ConfigError, match="--scorer"):
        _parse("outrider proposer --method eagle3")
    with pytest.raises(ConfigError, match="--no-such-flag"):
        _parse("outrider serve embedded --no-such-flag")
