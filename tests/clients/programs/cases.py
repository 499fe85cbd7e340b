"""Cases of a client's program: each runs, and a line of JSON tells what came of it."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

BASE_URL = sys.argv[1]
"""The server, without /v1."""
API = f"{BASE_URL}/v1"
_found: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a case, which raises where the client does not get what it should."""
    _found.append(function)
    return function


def main() -> None:
    """Run all cases, or those that are named behind the address."""
    wanted = sys.argv[2:]
    for function in _found:
        if wanted and function.__name__ not in wanted:
            continue
        error = ""
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"case": function.__name__, "error": error}), flush=True)


def raises(kind: type[Exception], says: str, call: Callable[[], Any]) -> None:
    """Demand that a call raises such an error with such words."""
    said = None
    try:
        call()
    except kind as error:
        said = str(error)
    assert said is not None, f"no {kind.__name__}"
    assert says in said, f"{says!r} is not in {said}"
