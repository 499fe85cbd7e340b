"""Turn vLLM's outputs for one request into commits of ours. Imports no vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.errors import InternalError
from outrider.params import VerificationRule
from outrider.types import (
    Commit,
    FinishReason,
    MethodCounts,
    PromptLogprobs,
    Request,
    RequestStats,
    TokenKind,
    TokenLogprobs,
)

_OF_DRAFTS = (
    *("rounds", "drafted", "accepted", "accepted_per_pos", "k_histogram", "hits", "misses_late"),
    *("misses_wrong", "waits", "wait_ms", "fallback_rounds", "propose_ms", "score_ms"),
    *("network_ms", "proposer_ids", "rounds_after_hit", "hits_after_hit", "rounds_after_miss"),
    *("hits_after_miss", "drafts_per_context", "accepted_per_context"),
)
"""Fields of `RequestStats` that the draft side knows better."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Progress:
    """Makes commits of the outputs of one request, and keeps its account.

    vLLM does not say which tokens were drafted. Of an output of several tokens, all but the last
    were, since only speculation yields several at once; a round with no accepted draft token looks
    like one without a draft, until the last output tells (`spec_decode_metrics`).
    """

    def __init__(self, request: Request, k: int, rule: VerificationRule) -> None:
        """Take the draft tokens of a round, 0 without speculation, and the rule."""
        self._request = request
        self._k = k
        self._rule = rule
        self._committed = len(request.prompt_token_ids)
        self._output_tokens = 0
        self._accepted: Counter[int] = Counter()  # rounds by accepted draft tokens
        self._last_accepted = 0  # of the last round
        self._drafted: Counter[int] | None = None  # rounds by draft tokens, once it is known
        self._cached = 0
        self._queue_ms = self._prefill_ms = self._score_ms = 0.0
        self._preemptions = 0

    def commit(self, output: Any) -> Commit:
        """Return the tokens of one of vLLM's `RequestOutput`s of new tokens.

        Raises `InternalError` if vLLM ended the request for a reason of its own.
        """
        part = output.outputs[0]
        token_ids, stop_token_id = tuple(part.token_ids), None
        reason = None
        if output.finished:
            reason = _FINISH.get(part.finish_reason)
            if reason is None:
                raise InternalError(f"vLLM ended the request: {part.finish_reason}.")
            if reason is FinishReason.STOP and token_ids:
                token_ids, stop_token_id = token_ids[:-1], token_ids[-1]
        self._note_times(output)
        kinds = self._kinds(len(part.token_ids))[: len(token_ids)]
        base_len = self._committed
        self._committed += len(token_ids)
        self._output_tokens += len(token_ids)
        if reason is not None:
            self._note_rounds(getattr(part, "spec_decode_metrics", None))
        running = self._request.running_stats or reason is not None
        return Commit(
            session_id=self._request.session_id,
            base_len=base_len,
            token_ids=token_ids,
            kinds=kinds,
            num_draft_tokens=self._k,
            finish_reason=reason,
            stats=self.stats() if running else None,
            logprobs=self._logprobs(part, token_ids),
            stop_token_id=stop_token_id,
            prompt_logprobs=self._prompt_logprobs(output),
        )

    def stats(self) -> RequestStats:
        """Return the account so far."""
        accepted = self._accepted
        drafted = self._drafted or accepted
        rounds, longest = accepted.total(), max(accepted, default=0)
        return RequestStats(
            prompt_tokens=len(self._request.prompt_token_ids),
            output_tokens=self._output_tokens,
            iter_count=rounds,
            rounds=rounds,
            drafted=sum(k * number for k, number in drafted.items()),
            accepted=sum(n * number for n, number in accepted.items()),
            accepted_per_pos=tuple(
                sum(number for n, number in accepted.items() if n > i) for i in range(longest)
            ),
            k_histogram=tuple(drafted[k] for k in range(max(drafted, default=0) + 1)),
            hits=0,
            misses_late=0,
            misses_wrong=0,
            waits=0,
            wait_ms=0.0,
            fallback_rounds=0,
            queue_ms=self._queue_ms,
            prefill_ms=self._prefill_ms,
            propose_ms=0.0,
            score_ms=self._score_ms,
            network_ms=0.0,
            cached_prompt_tokens=self._cached,
            proposer_ids=(),
            preemptions=self._preemptions,
            verification=self._rule,
        )

    def stats_with(self, told: dict[str, Any] | None) -> RequestStats:
        """Return the account with what the draft side tells: the fields of its `RequestStats`."""
        ours = self.stats()
        if told is None:
            return ours
        fields = {name: told[name] for name in _OF_DRAFTS}
        fields = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
        by_method = told["by_method"]
        if isinstance(by_method, list | tuple):
            fields["by_method"] = tuple(MethodCounts(*counts) for counts in by_method)
        return replace(ours, **fields)

    def _kinds(self, count: int) -> tuple[TokenKind, ...]:
        """Return the kinds of an output's tokens; of several rounds if the reader was slow."""
        if not self._k:
            self._accepted[0] += count
            return (TokenKind.PLAIN,) * count
        kinds: list[TokenKind] = []
        while count:
            size = min(count, self._k + 1)
            last = TokenKind.BONUS if size > self._k else TokenKind.RECOVERED
            kinds += [TokenKind.ACCEPTED] * (size - 1)
            kinds.append(last if size > 1 else TokenKind.PLAIN)
            self._accepted[size - 1] += 1
            self._last_accepted = size - 1
            count -= size
        return tuple(kinds)

    def _note_times(self, output: Any) -> None:
        self._cached = output.num_cached_tokens or self._cached
        times = output.metrics
        if times is None or not times.first_token_ts:
            return
        self._queue_ms = max(0.0, times.scheduled_ts - times.queued_ts) * 1e3
        self._prefill_ms = max(0.0, times.first_token_ts - times.scheduled_ts) * 1e3
        self._score_ms = max(0.0, times.last_token_ts - times.first_token_ts) * 1e3
        self._preemptions = getattr(times, "num_preemptions", 0)

    def _note_rounds(self, told: Any) -> None:
        """Replace what the outputs showed by what vLLM counted, if it did."""
        if told is None or not told.per_step_drafted:
            return
        accepted = list(told.per_step_accepted)
        accepted[-1] = min(accepted[-1], self._last_accepted)  # vLLM's goes on behind the end
        plain = max(0, self._accepted.total() - len(accepted))
        self._accepted = Counter(accepted) + Counter({0: plain})
        self._drafted = Counter(told.per_step_drafted) + Counter({0: plain})

    def _logprobs(self, part: Any, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        count = self._request.top_logprobs
        if count is None:
            return ()
        pairs = zip(token_ids, part.logprobs or (), strict=False)
        return tuple(_token_logprobs(token, known, count) for token, known in pairs)

    def _prompt_logprobs(self, output: Any) -> PromptLogprobs | None:
        """Return them with the request's first output, with which vLLM tells them."""
        count = self._request.prompt_logprobs
        if count is None or not output.prompt_logprobs:
            return None
        pairs = zip(self._request.prompt_token_ids, output.prompt_logprobs, strict=True)
        told = [_token_logprobs(token, known, count) for token, known in pairs if known]
        return PromptLogprobs(
            [each.logprob for each in told],
            [token for each in told for token, _ in each.top],
            [logprob for each in told for _, logprob in each.top],
        )


def _token_logprobs(token: int, known: dict[int, Any], count: int) -> TokenLogprobs:
    """Return what vLLM tells of a position by token: of `token`, and of the `count` likeliest."""
    likeliest = sorted(known.items(), key=lambda item: -item[1].logprob)[:count]
    top = tuple((other, each.logprob) for other, each in likeliest)
    return TokenLogprobs(known[token].logprob, top)
