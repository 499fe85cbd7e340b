"""Outputs of requests under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.generation import Chunk, Ending
from gateway.openai.choices import Completion
from gateway.openai.deltas import message_of
from gateway.openai.job import Job
from gateway.output import OutputToken
from outrider.models.tokenizer import Tokenizer
from outrider.offline.params import RequestOutputKind
from outrider.types import TokenKind, TokenLogprobs
from outrider.v1.common_pb2 import AuxInfo

ABORTED: Final = "abort"
"""The finish reason of a request that was aborted."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural logarithm of the model's probability, and its rank from 1."""

    logprob: float
    rank: int | None = None  # None: not among those that were asked for
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """Without the stop token that ended it."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: itself and the likeliest."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None: it goes on."""
    stop_reason: str | int | None = None
    """The stop string or the id in `stop_token_ids` that ended it; None: the model's own end."""
    message: dict[str, Any] | None = None
    """A chat's answer once it has ended, with `reasoning` and `tool_calls` as the HTTP API has
    them; None where the model's format knows neither."""
    aux_info: AuxInfo | None = field(default=None, repr=False)
    """The account of speculation, once a request has ended; docs/api.md describes the fields."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The completions of one prompt."""

    request_id: str
    prompt: str | None
    """None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """All, by index; of what is new, those that have something new."""
    finished: bool
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache, once the request has ended."""
    index: int = 0
    """Number of the prompt among those of one call."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With the last output, if asked for: for each token of the prompt itself and the likeliest.
    None for the first token, which nothing precedes."""

    @property
    def aux_info(self) -> AuxInfo | None:
        """Return what speculation did for the first completion, with its end."""
        return next((each.aux_info for each in self.outputs if each.index == 0), None)


class _Written:
    """Tokens of one completion, as columns of `OutputToken`, and its end.

    An object a token would keep the garbage collector busy for longer than the tokens take.
    """

    def __init__(self, tokens: Iterable[OutputToken] = (), ending: Ending | None = None) -> None:
        self.ids: list[int] = []
        self.kinds: list[TokenKind] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.ending = ending
        # What deltas have shown: tokens, the sum of their logprobs, and the end.
        self.num_shown = 0
        self.sum_shown = 0.0
        self.end_shown = False
        self.add(tokens)

    def add(self, tokens: Iterable[OutputToken]) -> None:
        for column, new in zip(self._columns, zip(*tokens, strict=True), strict=False):
            column += new

    def not_shown(self) -> _Written:
        """Return the tokens that no delta has shown."""
        rest = _Written(ending=self.ending)
        for column, found in zip(rest._columns, self._columns, strict=True):
            column += found[self.num_shown :]
        return rest

    def tokens(self) -> tuple[OutputToken, ...]:
        return tuple(map(OutputToken, *self._columns))

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        return self.ids, self.kinds, self.texts, self.logprobs


class Tracker:
    """The outcome of one request so far."""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        *,
        request_id: str,
        prompt: str | None,
        kind: RequestOutputKind,
        index: int,
    ) -> None:
        self.index = index
        self._job = job
        self._tokenizer = tokenizer
        self._request_id = request_id
        self._prompt = prompt
        self._kind = kind
        self._written = [_Written() for _ in job.work]
        self._aborted = False

    @property
    def finished(self) -> bool:
        return self._aborted or all(each.ending is not None for each in self._written)

    def add(self, index: int, chunk: Chunk) -> bool:
        """Add a chunk; return whether there is something to show."""
        written, ending, only = self._written[index], chunk.ending, self._job.scores_only
        if not only:
            written.add(chunk.tokens)
        if ending is not None:
            written.ending = ending.of_prompt() if only else ending
        return self.finished or self._kind is not RequestOutputKind.FINAL_ONLY

    def abort(self) -> None:
        """End the completions that have not ended."""
        self._aborted = True

    def take(self) -> RequestOutput:
        """Return what there is to show."""
        job, first = self._job, self._written[0].ending
        prompt_token_ids = list(job.work[0].prompt_token_ids)
        if job.shaper.n < job.shaper.per_prompt and not self._aborted:
            ended = [
                Completion(each.tokens(), each.ending)
                for each in self._written
                if each.ending is not None
            ]
            outputs = [
                self._output(number, _Written(completion.tokens, completion.ending))
                for number, completion in enumerate(job.shaper.best(ended))
            ]
        elif self._kind is RequestOutputKind.DELTA:
            outputs = self._new()
        else:
            outputs = [self._output(*numbered) for numbered in enumerate(self._written)]
        return RequestOutput(
            self._request_id,
            self._prompt,
            prompt_token_ids,
            outputs,
            self.finished,
            None if first is None else first.usage.cached_prompt_tokens,
            self.index,
            self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        ending = self._written[0].ending
        if ending is None or ending.prompt_logprobs is None or not self.finished:
            return None
        ids = self._job.work[0].prompt_token_ids[1:]
        return [None, *map(self._entries, ids, ending.prompt_logprobs)]

    def _new(self) -> list[CompletionOutput]:
        """Return what is new of the completions that have something new."""
        outputs = []
        for number, written in enumerate(self._written):
            new = written.not_shown()
            ends = not written.end_shown and (written.ending is not None or self._aborted)
            if new.ids or ends:
                outputs.append(self._output(number, new, written.sum_shown))
                written.num_shown += len(new.ids)
                written.sum_shown = outputs[-1].cumulative_logprob or 0.0
                written.end_shown |= ends
        return outputs

    def _output(self, index: int, written: _Written, before: float = 0.0) -> CompletionOutput:
        """`before` is the sum of the logprobs of the tokens before these."""
        logprobs, ending = None, written.ending
        if self._job.shaper.with_logprobs:
            logprobs = [*map(self._logprobs, written.ids, written.logprobs)]
        return CompletionOutput(
            index=index,
            text="".join(written.texts),
            token_ids=list(written.ids),
            cumulative_logprob=(
                None
                if logprobs is None
                else sum((each.logprob for each in written.logprobs if each is not None), before)
            ),
            logprobs=logprobs,
            finish_reason=(
                ending.reason.value if ending is not None else ABORTED if self._aborted else None
            ),
            stop_reason=None if ending is None else self._stop_reason(ending),
            message=self._message(index, ending),
            aux_info=None if ending is None else ending.aux_info,
        )

    def _message(self, index: int, ending: Ending | None) -> dict[str, Any] | None:
        reading = self._job.shaper.reading
        if reading is None or ending is None or self._job.shaper.n < self._job.shaper.per_prompt:
            return None
        return message_of(reading, self._written[index].texts).fields

    def _stop_reason(self, ending: Ending) -> str | int | None:
        if isinstance(ending.stop, str) or ending.stop in self._job.work[0].stop.stop_token_ids:
            return ending.stop
        return None  # the model's own end

    def _logprobs(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[int, Logprob]:
        assert logprobs is not None, "asked for with every token"
        return self._entries(token_id, logprobs)

    def _entries(self, own_id: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        entries = {
            token_id: Logprob(logprob, rank, self._spell(token_id))
            for rank, (token_id, logprob) in enumerate(logprobs.top, 1)
        }
        own = Logprob(logprobs.logprob, None, self._spell(own_id))
        return entries if own_id in entries else {own_id: own, **entries}

    def _spell(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")
