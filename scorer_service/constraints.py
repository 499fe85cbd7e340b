"""Compiles constraints on threads of its own, within a time and a bounded queue."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from outrider.engine.sampling.constraint import ConstraintCompiler, ConstraintEditor
from outrider.errors import CapacityError, ConfigError, InvalidRequestError
from outrider.rpc import runtime
from outrider.types import EngineInfo, Request

_THREADS = 2  # one compilation that takes seconds does not keep others waiting
_MAX_PENDING = 1024
_TIMEOUT_S = 10.0


class Constraints:
    """Constraints of requests. Used on the event loop.

    `compiler` is None where the model's tokenizer cannot be constrained.
    """

    def __init__(
        self, compiler: ConstraintCompiler | None, *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="constraints")
        self._pending: set[Future[ConstraintEditor]] = set()

    @classmethod
    def load(cls, folder: Path, info: EngineInfo) -> Constraints:
        """Load the tokenizer in a model's folder, and report if it cannot be constrained."""
        try:
            return cls(ConstraintCompiler.load(folder, info.vocab_size, info.eos_token_ids))
        except ConfigError as error:
            runtime.progress("scorer", f"no structured output with this model. {error.message}")
            return cls(None)

    async def editor(self, request: Request) -> ConstraintEditor | None:
        """Return the editor of the request's logits; None if it asks for no constraint.

        Raises `InvalidRequestError`, naming the constraint's kind, for one that cannot be compiled
        in time, and `CapacityError`.
        """
        constraint, compiler = request.constraint, self._compiler
        if constraint is None:
            return None
        param = constraint.kind.value
        if compiler is None:
            raise InvalidRequestError(
                f"{param} cannot be used: the model's folder holds no tokenizer.json that "
                "llguidance can read.",
                param=param,
            )
        self._pending = {future for future in self._pending if not future.done()}
        if len(self._pending) >= _MAX_PENDING:
            raise CapacityError("Too many constraints wait to be compiled. Try again later.")
        prompt = request.prompt_token_ids
        resumed = prompt[len(prompt) - request.num_resumed_tokens :]
        future = self._pool.submit(compiler.editor, constraint, request.stop, resumed)
        self._pending.add(future)
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(waiting)
        except TimeoutError:
            if future.cancel():
                raise CapacityError(
                    "Constraints before this one take too long. Try later."
                ) from None
            raise InvalidRequestError(
                f"{param} takes longer than {self._timeout_s:g} s to compile: simplify it.",
                param=param,
            ) from None
        finally:
            future.cancel()  # no effect once it has begun

    def close(self) -> None:
        """Stop without waiting for a compilation in progress, which ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _retrieve(future: asyncio.Future[ConstraintEditor]) -> None:
    """Mark a failure as retrieved, since the request may have ended before."""
    if not future.cancelled():
        future.exception()
