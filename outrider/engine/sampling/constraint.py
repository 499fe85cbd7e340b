"""Structured output: masks that keep a request's text within a JSON schema, a regex or a grammar.

llguidance (Koo et al., arXiv 2407.08103, describe the idea; this library derives lexers by
Brzozowski's derivatives and parses with Earley's algorithm) says which tokens may come next. A
mask is laid over every row of logits that a step verifies, row j's after the drafted tokens before
it, so a draft cannot change the text: it is accepted where the masked target would have chosen it.

Where the text is complete, end-of-sequence and stop tokens may be chosen; before, they may not, for
they would cut it short. Where nothing else may follow, the request ends by itself: neither
`ignore_eos` nor `min_tokens` makes it go on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.sampling.grammar import grammar_of, limits, load_tokenizer
from outrider.errors import ConfigError, InvalidRequestError
from outrider.params import Constraint, StopParams, TokenIds
from outrider.types import FinishReason

_MAX_ERROR_CHARS = 500
_NO_TEXT = "NoExtensionBias"  # llguidance's reason to stop where nothing may follow
_LEXER_ERROR = "lexer error"  # it has as many states as it may, or one is too complex
_RENEWED_EVERY = 256  # tokens of a request at least: what it asks of the engine's thread is bounded
_MAX_RENEWED_CHARS = 2**14  # of a constraint that is compiled there, within some 50 ms


class ConstraintCompiler:
    """Constraints to matchers, for one tokenizer. May be used from several threads at once.

    `vocab_size` is the model's: tokens that pad it beyond the tokenizer's are never chosen. Raises
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
        self._ends = eos_token_ids | frozenset(self._tokenizer.eos_tokens)
        self._max_cached = max_cached
        self._cached: OrderedDict[Constraint, LLMatcher] = (
            OrderedDict()
        )  # least recently used first
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> ConstraintCompiler:
        """For the tokenizer.json in a model's folder. Raises `ConfigError`."""
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"The model folder has no tokenizer.json: {error}") from error
        return cls(text, vocab_size, eos_token_ids)

    def editor(
        self, constraint: Constraint, stop: StopParams, resumed: Sequence[int] = ()
    ) -> ConstraintEditor:
        """What masks one request's logits; `resumed` is its output of an earlier run.

        Takes up to seconds if the constraint is new. Raises `InvalidRequestError`, naming the
        constraint's kind, for one that cannot be compiled or that `resumed` breaks.
        """
        ends = stop.stop_token_ids | (frozenset() if stop.ignore_eos else self.eos_token_ids)
        editor = ConstraintEditor(
            self._compiled(constraint),
            constraint.kind.value,
            ends,
            never_text=ends | self._ends,
            num_bytes=-(-self._tokenizer.vocab_size // 32) * 4,
            renewed=partial(self._renewed, constraint),
            forget=partial(self._forget, constraint),
        )
        editor.commit(tuple(resumed))
        if editor.error is not None:
            raise InvalidRequestError(
                "The prompt's last num_resumed_tokens tokens are not output that this constraint "
                "allows.",
                param=constraint.kind.value,
            )
        return editor

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        with self._lock:
            if constraint in self._cached:
                self._cached.move_to_end(constraint)
                return self._cached[constraint]
        matcher = self._compile(constraint)  # two threads may do the same: harmless
        with self._lock:
            self._cached[constraint] = matcher
            while len(self._cached) > self._max_cached:
                self._cached.popitem(last=False)
        return matcher

    def _forget(self, constraint: Constraint, matcher: LLMatcher) -> None:
        """Nobody else is to begin with a matcher whose lexer is full."""
        with self._lock:
            if self._cached.get(constraint) is matcher:
                del self._cached[constraint]

    def _renewed(self, constraint: Constraint) -> LLMatcher | None:
        """What takes the place of a matcher that was forgotten; for whoever asks first, or later.

        None if compiling it takes too long for an engine: then those that come later have it done.
        """
        with self._lock:
            known = constraint in self._cached
        if not known and len(constraint.source) > _MAX_RENEWED_CHARS:
            return None
        return self._compiled(constraint)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        param = constraint.kind.value
        try:
            matcher = LLMatcher(
                self._tokenizer, grammar_of(constraint), log_level=0, limits=limits(constraint.kind)
            )
            error = matcher.get_error()
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if not error and _NO_TEXT not in matcher.get_error():
                error = matcher.get_error()  # what it begins with is too complex already
        except ValueError as failure:
            error = str(failure)
        if error:
            message = " ".join(error[:_MAX_ERROR_CHARS].split())
            raise InvalidRequestError(f"{param} cannot be used: {message}.", param=param)
        if not (mask & ~_bits(self._ends, len(mask))).any():
            raise InvalidRequestError(f"{param} allows no text but the empty one.", param=param)
        return matcher


class ConstraintEditor:
    """Implements `LogitsEditor`. Moved by committed tokens only; drafts are tried and taken back.

    Copies of a matcher share its lexer, whose states add up over all requests of a constraint, and
    over their drafts. So that none ends for what others have seen, one that is full is `renewed`.

    Not to be used by two threads at once.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        param: str,
        ends: frozenset[int],
        *,
        never_text: frozenset[int],
        num_bytes: int,
        renewed: Callable[[], LLMatcher | None],
        forget: Callable[[LLMatcher], None],
    ) -> None:
        self._compiled = compiled
        self._renewed = renewed
        self._forget = forget
        self._renew_from = 0  # tokens of output
        self._matcher = compiled.deep_copy()
        self._output: list[int] = []
        self._param = param
        self._ends = _bits(ends, num_bytes)
        self._text = ~_bits(never_text, num_bytes)
        self._never_text = never_text
        self._num_bytes = num_bytes
        self.end: int | None = None
        """The row of the last `edit` after which no text may follow, or from which on none was
        looked at: its choice is none."""
        self.error: InvalidRequestError | None = None
        """Why this request cannot go on: its grammar leads nowhere, or is too complex here."""

    def copy(self) -> ConstraintEditor:
        """An editor that goes on from here by itself."""
        twin = object.__new__(ConstraintEditor)
        twin.__dict__.update(
            self.__dict__, _matcher=self._matcher.deep_copy(), _output=[*self._output]
        )
        return twin

    def edit(self, logits: Tensor, draft: TokenIds) -> None:
        """In place, as `LogitsEditor.edit`. Rows that no text reaches keep their logits."""
        masks = np.full((len(logits), self._num_bytes), 0xFF, np.uint8)
        row, taken = self._walk(masks, draft)
        if self._renew():
            masks.fill(0xFF)
            self._walk(masks[:1], ())  # it may have been the draft
            if self.end is None and draft:
                self.end = 1
        elif row:
            self._take_back(taken, row)
        bits = torch.from_numpy(masks).to(logits.device, non_blocking=True)
        bias = torch.nn.functional.embedding(bits.int(), _bias_of_bytes(logits.device))
        logits += bias.view(len(logits), -1)[:, : logits.shape[1]]

    def commit(self, tokens: TokenIds) -> None:
        """These became output; none of them ends it."""
        self._output += tokens
        went_on = not tokens or self._matcher.consume_tokens(list(tokens)) or self._renew()
        if not went_on and self.error is None:
            self.error = self._stuck()

    def num_allowed(self, draft: TokenIds) -> int:
        """How many of `draft` may follow the output: what comes after them is drafted in vain."""
        if len(self._output) < self._renew_from:
            return 0  # they could fill the new lexer, too
        text = next((i for i, token in enumerate(draft) if token in self._never_text), len(draft))
        return self._matcher.validate_tokens(list(draft[:text])) if text else 0

    def finish(self, reason: FinishReason | None) -> FinishReason | None:
        """STOP if no text may follow the committed output; else `reason`.

        Looks at every token only where that is likely, or the request ends anyway.
        """
        if not self._matcher.is_stopped() and self.end is None and reason is None:
            return None
        mask = np.zeros(self._num_bytes, np.uint8)
        led_on = self._fill(mask) or (self._renew() and self._fill(mask))
        if led_on or self.error is not None:
            return reason
        return FinishReason.STOP

    def _walk(self, masks: NDArray[np.uint8], draft: TokenIds) -> tuple[int, int]:
        """Fill masks, as far as text may go; the last row, and how many of `draft` were taken."""
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

    def _renew(self) -> bool:
        """Whether all that was wrong is that the lexer was full, and the output goes on anew."""
        if not self._matcher.is_error() or _LEXER_ERROR not in self._matcher.get_error():
            return False
        self._forget(self._compiled)
        if len(self._output) < self._renew_from or (compiled := self._renewed()) is None:
            return False
        self._renew_from = len(self._output) + _RENEWED_EVERY
        self._compiled, self._matcher, self.error = compiled, compiled.deep_copy(), None
        self._matcher.consume_tokens(self._output)
        return not self._matcher.is_error()

    def _take_back(self, taken: int, row: int) -> None:
        """Return from `row`. Where a draft led nowhere, the output need not go."""
        self.error = None
        if not self._matcher.is_error():
            self._matcher.rollback(taken)
            return
        # It stays in error for good.
        self.end = row
        self._matcher = self._compiled.deep_copy()
        self._matcher.consume_tokens(self._output)

    def _fill(self, mask: NDArray[np.uint8]) -> bool:
        """Write what may follow, a bit per token; False, and all of them, if no text may."""
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        accepting = matcher.is_accepting()
        led_on = bool(mask.any())
        mask &= self._text
        if not mask.any():
            mask.fill(0xFF)
            if matcher.is_error() or not (accepting or led_on):
                self.error = self._stuck()
            return False
        if accepting:
            mask |= self._ends
        return True

    def _stuck(self) -> InvalidRequestError:
        why = " ".join(self._matcher.get_error()[:_MAX_ERROR_CHARS].split())
        if _LEXER_ERROR in why:
            self._forget(self._compiled)
        return InvalidRequestError(
            f"{self._param} leads to a place where nothing may follow, or is too complex to "
            f"continue{f' ({why})' if why else ''}: simplify it.",
            param=self._param,
        )


def _bits(tokens: frozenset[int], num_bytes: int) -> NDArray[np.uint8]:
    """A bit per token of a vocabulary, the lowest first."""
    bits = np.zeros(num_bytes, np.uint8)
    for token in tokens:
        if token < 8 * num_bytes:
            bits[token // 8] |= 1 << token % 8
    return bits


@lru_cache(maxsize=8)
def _bias_of_bytes(device: torch.device) -> Tensor:
    """float32 [256, 8]: 0 for a bit that is set, -inf for others.

    Looked up by bytes of a mask, it is many times faster than spreading bits and filling.
    """
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)
