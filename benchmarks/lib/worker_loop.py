"""JSON lines between the benchmark and a worker process.

A worker may run in another virtual environment (vLLM's), so this file imports the standard library
alone. Requests come on stdin and answers go to the original stdout. Text that libraries print to
stdout is sent to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(build: Callable[[], Handler]) -> None:
    """Build the handler, say that it is ready, and answer each line until stdin ends.

    An exception becomes an `error` answer.
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
