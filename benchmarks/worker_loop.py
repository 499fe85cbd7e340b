"""JSON lines between the benchmark and a worker process. Standard library only.

A worker may run in another virtual environment (vLLM's), so this file imports nothing of Outrider.
Requests come on stdin, answers go to the original stdout; everything that libraries print to
stdout is sent to stderr, so that it cannot spoil an answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(build: Callable[[], Handler]) -> None:
    """Build the handler, says so, then answers one line per line until stdin ends.

    An exception becomes an `error` answer; the loop goes on.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    handler = build()
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        try:
            answer = handler(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
