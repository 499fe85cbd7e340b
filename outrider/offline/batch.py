"""`outrider batch`: answers OpenAI's batch files without a server.

python -m outrider.offline.batch -i requests.jsonl -o answers.jsonl --model MODEL
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gateway.config import GeneratorConfig
from gateway.openai.errors import error_body, error_response, public_error
from gateway.openai.parse import parse
from gateway.openai.requests import ChatRequest, CompletionRequest, Request
from outrider.errors import ConfigError, InvalidRequestError, OutriderError, fail, refuse
from outrider.flag_types import RaisingParser
from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import Tokenizer
from outrider.process.temporary import temporary_folder

if TYPE_CHECKING:
    from outrider.offline.engine import LocalEngine

_KINDS: Final[dict[str, type[Request]]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
_PENDING: Final = 1024  # lines read and not yet answered


class Written:
    """The answers that were written, by what they say. Used from any thread."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self.answered = self.refused = 0
        self.failure: Exception | None = None  # the first failed write, which is the last one

    def put(self, custom_id: str | None, answer: dict[str, Any] | BaseException) -> None:
        """Write an answer as a line."""
        status, body = 200, answer
        if isinstance(answer, BaseException):
            if not isinstance(answer, Exception):  # cancelled: the batch was interrupted
                return
            error = public_error(answer)
            status, body = error_response(error).status_code, error_body(error)
        request_id = uuid.uuid4().hex
        line = {
            "id": f"batch_req_{request_id}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }
        with self._lock:
            if self.failure is not None:
                return
            try:
                self._write(json.dumps(line))
            except Exception as error:
                self.failure = error
                return
            self.answered += status == 200
            self.refused += status != 200


def read_line(text: str | bytes, seen: set[str]) -> tuple[str | None, Request | OutriderError]:
    """Return a line's custom_id, and its request or what is wrong with it."""
    custom_id: str | None = None
    try:
        try:
            line = json.loads(text)
        except ValueError as error:  # a UnicodeDecodeError, too
            raise InvalidRequestError(f"The line is not JSON: {error}.") from error
        if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
            raise InvalidRequestError(
                "A line is an object with custom_id (a string), method, url and body.",
                param="custom_id",
            )
        custom_id = line["custom_id"]
        if custom_id in seen:
            raise InvalidRequestError("An earlier line has this custom_id.", param="custom_id")
        seen.add(custom_id)
        if line.get("method") != "POST":
            raise InvalidRequestError('method must be "POST".', param="method")
        url = line.get("url")
        if not isinstance(url, str) or url not in _KINDS:
            raise InvalidRequestError(f"url must be one of {', '.join(_KINDS)}.", param="url")
        body = parse(_KINDS[url], json.dumps(line.get("body")).encode())
        if body.stream:
            raise InvalidRequestError("stream must be false in a batch.", param="stream")
    except OutriderError as error:
        return custom_id, error
    except RecursionError:
        return custom_id, InvalidRequestError("The line is nested too deeply.")
    return custom_id, body


def run_batch(
    engine: LocalEngine, lines: Iterable[str | bytes], write: Callable[[str], None]
) -> Written:
    """Answer the lines; `write` gets each answer, as a line, when it is there.

    Raises `OutriderError` once an answer cannot be written.
    """
    room = threading.BoundedSemaphore(_PENDING)
    written, seen = Written(write), set[str]()
    pending: set[Future[dict[str, Any]]] = set()

    def done(custom_id: str | None, future: Future[dict[str, Any]]) -> None:
        try:
            if not future.cancelled():
                written.put(custom_id, future.exception() or future.result())
        finally:
            pending.discard(future)
            room.release()

    try:
        for number, text in enumerate(lines, 1):
            if written.failure is not None:
                break
            if not text.strip():
                continue
            custom_id, body = read_line(text, seen)
            if isinstance(body, OutriderError):
                if custom_id is None:
                    body.message = f"Line {number}: {body.message}"
                written.put(custom_id, body)
                continue
            room.acquire()
            future = engine.answer(body)
            pending.add(future)
            future.add_done_callback(partial(done, custom_id))
        for _ in range(_PENDING):  # until every answer is written
            room.acquire()
            if written.failure is not None:
                break
    finally:
        for future in list(pending):
            future.cancel()
    if (failure := written.failure) is not None:
        raise OutriderError(
            f"An answer could not be written: {failure}. {written.answered + written.refused} "
            "were: make room, then run the batch again with the lines that have none."
        ) from failure
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 1 if it failed, 2 for a wrong set-up, 130 when interrupted."""
    output = ""
    try:
        args = _parser().parse_args(argv)
        output = args.output
        return _run(args)
    except OutriderError as error:
        return fail("batch", error)
    except OSError as error:
        return refuse("batch", ConfigError(f"{error.filename or output}: {error.strerror}"))
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    temporary_folder()
    # Imported here: a wrong flag is answered at once.
    from outrider.offline.arguments import Arguments, scorer_options
    from outrider.offline.engine import LocalEngine
    from outrider.offline.llm import Bar

    with open(args.input, "rb") as source:
        total = sum(1 for line in source if line.strip())
    try:
        speculative_config = json.loads(args.speculative_config or "null")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}.") from error
    names = Arguments.__slots__
    given = {
        name: value for name, value in vars(args).items() if name in names and value is not None
    }
    options = scorer_options(Arguments(**given | {"speculative_config": speculative_config}))
    tokenizer = Tokenizer.load(resolve_model(args.model, "target", tokenizer_only=True))
    if args.seed is not None and not 0 <= args.seed < 2**64:
        raise ConfigError("--seed must be an unsigned 64-bit number.")
    config = GeneratorConfig(served_model_name=options.served_model_name, seed=args.seed)
    if os.path.exists(args.output) and os.path.samefile(args.input, args.output):
        raise ConfigError("-o is the file of -i: name another, which the answers replace.")
    with (
        open(args.input, "rb") as source,
        open(args.output, "a", encoding="utf-8") as target,
        LocalEngine(options, tokenizer, config) as engine,
        Bar(total=total, desc="Requests", disable=None) as bar,
    ):
        if os.path.isfile(args.output):
            target.truncate(0)  # now that the model serves

        def write(line: str) -> None:
            print(line, file=target, flush=True)
            bar.update()

        written = run_batch(engine, source, write)
    print(
        f"batch: {written.answered} answered, {written.refused} refused; see {args.output}",
        file=sys.stderr,
    )
    return 0


def _parser() -> RaisingParser:
    parser = RaisingParser(
        prog="outrider batch",
        description="Answers a file of requests in OpenAI's batch format (JSON lines with "
        "custom_id, method, url and body) as the HTTP API would.",
    )
    add = parser.add_argument
    add("-i", "--input", required=True, metavar="FILE", help="requests, one a line")
    add("-o", "--output", required=True, metavar="FILE", help="answers, as they come")
    add("--model", default="embedded", help='"embedded", a folder, or a Hugging Face id')
    add("--served-model-name", metavar="NAME", help="as requests name it; default: --model")
    add("--speculative-config", metavar="JSON", help='as {"method": "ngram"}; default: no drafts')
    add("--dtype", default="auto", help="auto: the checkpoint's on a GPU, float32 on a CPU")
    add("--device", default="auto", help="auto, cpu, cuda or, say, cuda:1")
    add("--max-model-len", type=int, metavar="N", help="context; default: the model's")
    add("--max-num-seqs", type=int, metavar="N", help="requests in a batch")
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="PART")
    add("--seed", type=int, metavar="S", help="of requests that give none; default: a new one each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
