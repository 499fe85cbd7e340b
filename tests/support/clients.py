"""Servers for real clients, and the programs that are those clients (tests/clients)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import outrider.models
from outrider.v1 import scorer_pb2
from tests.support.browser import CHROMIUM
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import fake_scorer, running_gateway, tokenizer, tokens

PROGRAMS = Path(__file__).parents[1] / "clients" / "programs"
ENVIRONMENTS = Path(os.environ.get("OUTRIDER_CLIENTS", ".venv/clients")).absolute()
TARGET = Path(outrider.models.__file__).parent / "data" / "target"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    '<tool_call>\n{"name": "forecast", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
)
_DEADLINE_S = 500.0


@dataclass(frozen=True)
class Server:
    """An address, and the port of pages that may ask it."""

    http: str
    pages: int = 0


@asynccontextmanager
async def weather_server() -> AsyncIterator[Server]:
    """A gateway whose scorer plays a model that calls two tools, and then answers."""

    def says(request: scorer_pb2.ScorerServiceGenerateRequest) -> list[int]:
        prompt = tokenizer().decode(list(request.prompt_token_ids))
        results = prompt.count("<|tool|>")
        return tokens(CALLS[results] if results < len(CALLS) else "Sunny, then rain.")

    scorer = fake_scorer(Script(says, per_round=3), max_model_len=4096)
    async with running_gateway(scorer, tool_call_parser="hermes") as gateway:
        yield Server(gateway.http)


def run(environment: str, program: str, server: Server) -> dict[str, str]:
    """Run a client's cases; return what went wrong with each, "" if nothing did."""
    done = subprocess.run(
        _command(environment, program, server),
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        env=_variables(server),
        check=False,
    )
    return _results(done.stdout, done.stderr)


async def run_beside(environment: str, program: str, server: Server) -> dict[str, str]:
    """Do the same while this event loop serves."""
    process = await asyncio.create_subprocess_exec(
        *_command(environment, program, server),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_variables(server),
    )
    try:
        said, complained = await asyncio.wait_for(process.communicate(), _DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
    return _results(said.decode(), complained.decode())


def _command(environment: str, program: str, server: Server) -> Sequence[str]:
    if environment != "node":
        python = ENVIRONMENTS / environment / "bin" / "python"
        assert python.exists(), f"{python} does not exist: run `make test-clients`"
        return str(python), str(PROGRAMS / program), server.http
    node, modules = shutil.which("node"), ENVIRONMENTS / "node" / "node_modules"
    if node is None or not modules.exists():
        pytest.skip("there is no node, or no npm when the environments were made")
    # Node finds modules beside the file that imports them.
    for source in PROGRAMS.glob("*.mjs"):
        shutil.copy(source, modules.parent)
    return node, str(modules.parent / program), server.http


def _variables(server: Server) -> dict[str, str]:
    ours = {"TARGET": str(TARGET), "ALLOWED_PORT": str(server.pages), "CHROMIUM": CHROMIUM or ""}
    return {**os.environ, **ours, "OPENAI_API_KEY": "none", "PYTHONPATH": ""}


def _results(said: str, complained: str) -> dict[str, str]:
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"case"')]
    assert lines, f"no case ran:\n{said}\n{complained}"
    return {line["case"]: line["error"] for line in lines}
