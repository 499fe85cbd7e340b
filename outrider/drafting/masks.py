"""Mask drafts by what the scorer's constraints forbid.

A draft model that does not know the grammar drafts in vain wherever the grammar decides. A mask is
a hint as every draft is: where it cannot be made, drafts go without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from outrider.drafting.proposer import SessionStart
from outrider.engine.sampling.constraint import ConstraintCompiler, ConstraintEditor
from outrider.params import Constraint, StopParams, TokenIds

_log = logging.getLogger(__name__)


class DraftMask:
    """A session's mask, compiled beside the drafting thread and moved by committed tokens."""

    def __init__(self, editor: Future[ConstraintEditor], length: int) -> None:
        self._future = editor
        self._length = length  # committed tokens that the editor knows
        self._broken = False

    def after(self, tokens: Sequence[int]) -> ConstraintEditor | None:
        """Return an editor for one draft that stands after these committed tokens.

        None before it is compiled, and if that failed or the tokens break the constraint.
        """
        if self._broken or not self._future.done():
            return None
        if error := self._future.exception():  # the scorer's llguidance may be of another version
            _log.warning("drafting without a mask: %s", error)
            self._broken = True
            return None
        editor = self._future.result()
        editor.commit(tuple(tokens[self._length :]))
        self._length = len(tokens)
        self._broken = editor.error is not None
        return None if self._broken else editor.copy()

    def close(self) -> None:
        """Give up the mask of a session that is over, and its compilation if it has not begun."""
        self._future.cancel()
        self._broken = True


class DraftMasks:
    """Compiles masks on a thread of its own, so that no other session's draft waits."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    def open(self, constraint: Constraint, tokens: TokenIds, num_output: int) -> DraftMask:
        """Open a session whose last `num_output` committed tokens are output."""
        output = tokens[len(tokens) - num_output :]
        compiling = self._pool.submit(self._compiler.editor, constraint, StopParams(), output)
        return DraftMask(compiling, len(tokens))


def open_mask(masks: DraftMasks | None, start: SessionStart) -> DraftMask | None:
    """Return a session's mask; None without a constraint, or if no masks can be made."""
    if masks is None or start.constraint is None:
        return None
    return masks.open(start.constraint, tuple(start.prefix), start.num_output_tokens)
