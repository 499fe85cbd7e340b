"""Structured output: masks that keep a text within a JSON schema, a regex or a grammar.

llguidance (Koo et al., arXiv 2407.08103, describe the idea; this library derives lexers by
Brzozowski's derivatives and parses with Earley's algorithm) says which tokens may come next. A
mask is laid over every row of logits that a step verifies, row j's after the drafted tokens before
it. So a draft cannot change the text: a token is accepted where the masked target chooses it.

End-of-sequence and stop tokens may be chosen only where the text is complete. Where nothing else
may follow, the request ends by itself, whatever `ignore_eos` and `min_tokens` say.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.sampling.grammar import load_tokenizer, new_matcher
from outrider.errors import ConfigError, InvalidRequestError
from outrider.params import Constraint, StopParams, TokenIds
from outrider.types import FinishReason

_MAX_ERROR_CHARS = 500
_NO_TEXT = "NoExtensionBias"  # llguidance's reason to stop where nothing may follow
_LEXER_ERROR = "lexer error"  # the lexer has too many states, or one that is too complex
_RENEWED_EVERY = 256  # tokens of a request at least: this bounds the engine thread's work for it
_MAX_RENEWED_CHARS = 2**14  # of a constraint that the engine's thread may compile
_MASK_S = 5e-3
"""CPU time of a mask in the long run: every request of a step waits for it. A usual one takes less
than a tenth; a text of 100,000 characters to be copied literally, eight times as much."""
_SPARE_S = 1.0
"""CPU time that the masks of a request may take beyond that: the first ones of a lexer are slow."""
_TRIED = 5  # masks of a new constraint, along one text


class ConstraintCompiler:
    """Compiles constraints to matchers, for one tokenizer. Thread-safe.

    Tokens that pad the model's `vocab_size` beyond the tokenizer's are never chosen. Raises
    `ConfigError` for a tokenizer whose tokens' bytes are not known.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        max_cached: int = 64,
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer_json, vocab_size)
        self.eos_token_ids = eos_token_ids
        self.ends = eos_token_ids | frozenset(self._tokenizer.eos_tokens)
        self.num_bytes = -(-self._tokenizer.vocab_size // 32) * 4  # of a mask
        self._max_cached = max_cached
        self._cached: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # the oldest first
        self._slow: OrderedDict[Constraint, None] = OrderedDict()  # as long as the others
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> ConstraintCompiler:
        """Read the tokenizer.json in a model's folder. Raises `ConfigError`."""
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"The model folder has no tokenizer.json: {error}") from error
        return cls(text, vocab_size, eos_token_ids)

    def editor(
        self, constraint: Constraint, stop: StopParams, resumed: Sequence[int] = ()
    ) -> ConstraintEditor:
        """Return the editor of one request; `resumed` is its output of an earlier run.

        Takes up to seconds if the constraint is new. Raises `InvalidRequestError`, naming the
        constraint's kind, for one that cannot be compiled or that `resumed` breaks.
        """
        ends = stop.stop_token_ids | (frozenset() if stop.ignore_eos else self.eos_token_ids)
        editor = ConstraintEditor(self, constraint, ends)
        editor.commit(tuple(resumed))
        if editor.error is not None:
            raise InvalidRequestError(
                "The prompt's last num_resumed_tokens tokens are not output that this constraint "
                "allows.",
                param=constraint.kind.value,
            )
        return editor

    def compiled(self, constraint: Constraint) -> LLMatcher:
        """Return a matcher at its start, to be copied."""
        with self._lock:
            if constraint in self._slow:
                raise _too_slow(constraint)
            if constraint in self._cached:
                self._cached.move_to_end(constraint)
                return self._cached[constraint]
        matcher = self._compile(constraint)  # two threads may do the same: harmless
        with self._lock:
            self._cached[constraint] = matcher
            while len(self._cached) > self._max_cached:
                self._cached.popitem(last=False)
        return matcher

    def forget(self, constraint: Constraint, matcher: LLMatcher) -> None:
        """Drop a matcher whose lexer is full, so that nobody else begins with it."""
        with self._lock:
            if self._cached.get(constraint) is matcher:
                del self._cached[constraint]

    def forbid(self, constraint: Constraint) -> None:
        """Refuse a constraint, whose masks have proven slow, from now on."""
        with self._lock:
            self._cached.pop(constraint, None)
            self._slow[constraint] = None
            while len(self._slow) > self._max_cached:
                self._slow.popitem(last=False)

    def recompiled(self, constraint: Constraint) -> LLMatcher | None:
        """Return the successor of a forgotten matcher; None if it or its masks take too long."""
        with self._lock:
            known, slow = constraint in self._cached, constraint in self._slow
        if slow or (not known and len(constraint.source) > _MAX_RENEWED_CHARS):
            return None
        try:
            return self.compiled(constraint)
        except InvalidRequestError:  # its masks are slower than when it was new
            return None

    def _compile(self, constraint: Constraint) -> LLMatcher:
        param = constraint.kind.value
        try:
            matcher = new_matcher(self._tokenizer, constraint)
            error = matcher.get_error()
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if not error and _NO_TEXT not in matcher.get_error():
                error = matcher.get_error()  # the first mask is too complex already
        except ValueError as failure:
            error = str(failure)
        if error:
            message = " ".join(error[:_MAX_ERROR_CHARS].split())
            raise InvalidRequestError(f"{param} cannot be used: {message}.", param=param)
        if not (mask & ~_bits(self.ends, len(mask))).any():
            raise InvalidRequestError(f"{param} allows no text but the empty one.", param=param)
        if all(self._mask_s(matcher.deep_copy()) > _MASK_S for _ in range(2)):
            self.forbid(constraint)
            raise _too_slow(constraint)
        return matcher

    def _mask_s(self, matcher: LLMatcher) -> float:
        """Return the median CPU time of a mask after the first, and of the token before it."""
        ends: list[float] = []
        while len(ends) < _TRIED and not matcher.is_stopped():
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            text = np.flatnonzero(
                np.unpackbits(mask & ~_bits(self.ends, len(mask)), bitorder="little")
            )
            if matcher.is_error() or not len(text):
                break
            ends.append(time.thread_time())
            matcher.consume_tokens([int(text[-1])])  # the last tokens are the longest, as usual
        return float(np.median(np.diff(ends))) if len(ends) > 1 else 0.0


class ConstraintEditor:
    """Implements `LogitsEditor` for one thread. Only committed tokens move it for good.

    Copies of a matcher share its lexer, whose states add up over all requests of a constraint and
    over their drafts. A matcher whose lexer is full is replaced by a new one, so that no request
    ends for what others have seen.
    """

    def __init__(
        self, compiler: ConstraintCompiler, constraint: Constraint, ends: frozenset[int]
    ) -> None:
        self._compiler = compiler
        self._constraint = constraint
        self._compiled = compiler.compiled(constraint)
        self._matcher = self._compiled.deep_copy()
        self._renew_from = 0  # tokens of output
        self._owed_s = 0.0  # CPU time of masks beyond `_MASK_S` of each
        self._output: list[int] = []
        self._never_text = ends | compiler.ends
        self._num_bytes = compiler.num_bytes
        self._ends = _bits(ends, self._num_bytes)
        self._text = ~_bits(self._never_text, self._num_bytes)
        self.end: int | None = None
        """The first row of the last `edit` whose choice does not count: no text may follow there,
        or its mask was not computed."""
        self.error: InvalidRequestError | None = None
        """The reason why this request cannot go on."""

    def copy(self) -> ConstraintEditor:
        """Return an independent editor in the same state."""
        twin = copy.copy(self)
        twin._matcher, twin._output = self._matcher.deep_copy(), [*self._output]
        return twin

    def edit(self, logits: Tensor, draft: TokenIds) -> None:
        """Mask the logits in place. Rows that no text reaches keep theirs."""
        began = time.thread_time()
        masks = np.full((len(logits), self._num_bytes), 0xFF, np.uint8)
        row, taken = self._walk(masks, draft)
        if self._renew():
            began = time.thread_time()  # its compilation is no mask's
            masks.fill(0xFF)
            self._walk(masks[:1], ())  # the draft may have filled the lexer
            if self.end is None and draft:
                self.end = 1
        elif row:
            self._take_back(taken, row)
        self._pay(time.thread_time() - began, row + 1)
        bits = torch.from_numpy(masks).to(logits.device, non_blocking=True)
        bias = torch.nn.functional.embedding(bits.int(), _bias_of_bytes(logits.device))
        logits += bias.view(len(logits), -1)[:, : logits.shape[1]]

    def commit(self, tokens: TokenIds) -> None:
        """Take in output tokens; none of them ends it."""
        self._output += tokens
        fits = not tokens or self._matcher.consume_tokens(list(tokens)) or self._renew()
        if not fits and self.error is None:
            self.error = self._stuck()

    def num_allowed(self, draft: TokenIds) -> int:
        """Return how many tokens of `draft` may follow the output."""
        if len(self._output) < self._renew_from:
            return 0  # drafts could fill the new lexer, too
        text = next((i for i, token in enumerate(draft) if token in self._never_text), len(draft))
        return self._matcher.validate_tokens(list(draft[:text])) if text else 0

    def finish(self, reason: FinishReason | None) -> FinishReason | None:
        """Return STOP if no text may follow the committed output; else `reason`.

        The mask is computed only where the end is likely, or the request ends anyway.
        """
        if not self._matcher.is_stopped() and self.end is None and reason is None:
            return None
        mask = np.zeros(self._num_bytes, np.uint8)
        goes_on = self._fill(mask) or (self._renew() and self._fill(mask))
        if goes_on or self.error is not None:
            return reason
        return FinishReason.STOP

    def _walk(self, masks: NDArray[np.uint8], draft: TokenIds) -> tuple[int, int]:
        """Fill masks as far as text may go; return the last row, and the drafts consumed."""
        self.end = None
        row = taken = 0
        for row, mask in enumerate(masks):
            if row:
                if self._matcher.try_consume_tokens([draft[row - 1]]) == 0:
                    break
                taken += 1
            if not self._fill(mask):
                self.end = row
                break
        return row, taken

    def _pay(self, spent_s: float, masks: int) -> None:
        """End a request whose masks take too long, and refuse the next one with its constraint."""
        self._owed_s = max(0.0, self._owed_s + spent_s - _MASK_S * masks)
        if self._owed_s > _SPARE_S:
            self.error = _too_slow(self._constraint)
            self._compiler.forbid(self._constraint)

    def _renew(self) -> bool:
        """Replace a matcher whose lexer is full; False after another fault, or too soon."""
        if not self._matcher.is_error() or _LEXER_ERROR not in self._matcher.get_error():
            return False
        self._compiler.forget(self._constraint, self._compiled)
        if len(self._output) < self._renew_from:
            return False
        if (compiled := self._compiler.recompiled(self._constraint)) is None:
            return False
        self._renew_from = len(self._output) + _RENEWED_EVERY
        self._compiled, self._matcher, self.error = compiled, compiled.deep_copy(), None
        self._matcher.consume_tokens(self._output)
        return not self._matcher.is_error()

    def _take_back(self, taken: int, row: int) -> None:
        """Undo `_walk`, which came to `row`. A draft that led nowhere is no error of the output."""
        self.error = None
        if not self._matcher.is_error():
            self._matcher.rollback(taken)
            return
        self.end = row
        self._matcher = self._compiled.deep_copy()  # the other stays in error for good
        self._matcher.consume_tokens(self._output)

    def _fill(self, mask: NDArray[np.uint8]) -> bool:
        """Set a bit per token that may follow; if no text may, set all bits and return False."""
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        accepting = matcher.is_accepting()
        any_token = bool(mask.any())
        mask &= self._text
        if not mask.any():
            mask.fill(0xFF)
            if matcher.is_error() or not (accepting or any_token):
                self.error = self._stuck()
            return False
        if accepting:
            mask |= self._ends
        return True

    def _stuck(self) -> InvalidRequestError:
        why = " ".join(self._matcher.get_error()[:_MAX_ERROR_CHARS].split())
        if _LEXER_ERROR in why:
            self._compiler.forget(self._constraint, self._compiled)
        param = self._constraint.kind.value
        return InvalidRequestError(
            f"{param} leads to a place where nothing may follow, or is too complex to "
            f"continue{f' ({why})' if why else ''}: simplify it.",
            param=param,
        )


def _too_slow(constraint: Constraint) -> InvalidRequestError:
    """Return the refusal of a constraint whose masks would hold up other requests."""
    param = constraint.kind.value
    return InvalidRequestError(
        f"{param} takes too long at each token, for which all other requests wait: shorten the "
        "texts that it spells out, and what it repeats.",
        param=param,
    )


def _bits(tokens: frozenset[int], num_bytes: int) -> NDArray[np.uint8]:
    """Return a bit mask of a vocabulary, the lowest token first."""
    bits = np.zeros(num_bytes, np.uint8)
    for token in tokens:
        if token < 8 * num_bytes:
            bits[token // 8] |= 1 << token % 8
    return bits


@lru_cache(maxsize=8)
def _bias_of_bytes(device: torch.device) -> Tensor:
    """Return float32 [256, 8], by the bytes of a mask: 0 for a bit that is set, else -inf."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)
