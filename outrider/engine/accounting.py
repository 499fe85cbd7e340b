"""Turn what a step committed into its rows' accounts and the events that report it.

No step's tokens follow from any of this, so it is done while the device works on the next one.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import compress
from typing import Final, NamedTuple

from outrider.draft_port import EarlyTokens, GrownText, NewTokens
from outrider.engine.sampling.logprobs import to_prompt_logprobs
from outrider.engine.sequence import Sequence
from outrider.engine.step import Step
from outrider.params import TokenIds
from outrider.policy.base import StepDone
from outrider.rounds import Round, token_kinds
from outrider.rows.tracker import DraftTracker
from outrider.types import PLAIN, Commit, Failure, FinishReason, Grown, TokenLogprobs, VerifiedDraft


class Emitted(NamedTuple):  # made in a third of a frozen dataclass's time
    """Tokens that a step committed to a row, and their round."""

    seq: Sequence
    base_len: int  # committed tokens before the step
    output: TokenIds
    round: Round
    drafted_by: tuple[str, str]  # proposer and method
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...]
    draft: VerifiedDraft | None  # that was verified, if the request asks


class PlainRows(NamedTuple):
    """Rows that got a token without a draft, and no more than that, in columns."""

    seqs: Rows[Sequence]
    base_lens: Rows[int]  # committed tokens before the step
    token_ids: Rows[int]

    def without(self, places: Rows[int]) -> PlainRows:
        """Return the rows that are at none of these places."""
        if not places:
            return self
        left = [True] * len(self.seqs)
        for place in places:
            left[place] = False
        seqs, base_lens, token_ids = self
        return PlainRows(
            [*compress(seqs, left)], [*compress(base_lens, left)], [*compress(token_ids, left)]
        )


NO_PLAIN_ROWS: Final = PlainRows((), (), ())


@dataclass(frozen=True, slots=True)
class Committed:
    """Result of a step over all rows."""

    step: Step
    plain: PlainRows
    emitted: tuple[Emitted, ...]  # of the other rows, those with chains first
    failures: tuple[Failure, ...]  # of requests whose constraint leads nowhere
    num_running: int  # rows that were admitted
    temperature: float  # their mean
    decoding: bool  # no prompt was processed
    seconds: float  # from the step's launch to its result
    now: float  # of the result

    def grown_texts(self, *, drafting: bool) -> list[GrownText]:
        """Return the texts that a proposer on the engine's thread is to hear of.

        `drafting` says that the next round may have drafts.
        """
        rows = [(row.seq, row.finish_reason is not None) for row in self.emitted]
        if not drafting:
            return [(seq.session_id, seq.token_ids, 0, True) for seq, end in rows if end]
        rows += [(seq, False) for seq in self.plain.seqs]
        return [
            (seq.session_id, seq.token_ids, asked, end)
            for seq, end in rows
            if (asked := seq.drafting.num_draft_tokens) or end
        ]

    def early_tokens(self) -> EarlyTokens | None:
        """Return the tokens of rows that go on with a proposer's drafts; None without such rows.

        Proposers that read hidden states have the tokens with these.
        """
        heard = [
            NewTokens(seq.session_id, row.base_len, row.output)
            for row in self.emitted
            if _hears_early(seq := row.seq) and row.finish_reason is None
        ]
        heard += [
            NewTokens(seq.session_id, base_len, (token,))
            for seq, base_len, token in zip(*self.plain, strict=True)
            if _hears_early(seq)
        ]
        return EarlyTokens(tuple(heard), self.seconds) if heard else None


def finalize_step(tracker: DraftTracker, committed: Committed) -> tuple[tuple[Commit, ...], Grown]:
    """Count a step's rounds, and let the policy learn from them. Return what to report."""
    seqs, others = committed.step.seqs, committed.step.others
    emitted, seconds = committed.emitted, committed.seconds
    tracker.account.rounds(
        [
            (seq.counters, round_, len(output), by, base_len, base_len == seq.num_prompt_tokens)
            for seq, base_len, output, round_, by, _, _, _ in emitted
        ],
        seconds,
    )
    plain = committed.plain
    tracker.account.undrafted_rounds([seq.counters for seq in plain.seqs], seconds)
    told = [_finalize_row(tracker, row) for row in emitted if row.round.drafted or not _waits(row)]
    held = [i for i, seq in enumerate(plain.seqs) if seq.report_interval > 1]
    told += [_held_back(seq) for seq in map(plain.seqs.__getitem__, held) if _due(seq)]
    grown = plain.without(held)
    asked = [seq.drafting.num_draft_tokens for seq in grown.seqs] if tracker.may_draft else None
    columns = Grown(
        tuple([seq.session_id for seq in grown.seqs]),
        tuple(grown.base_lens),
        tuple(grown.token_ids),
        (0,) * len(grown.seqs) if asked is None else tuple(asked),
    )
    prompts = [len(r.slice.token_ids) for r in others if r.slice.start < r.seq.num_prompt_tokens]
    step = StepDone(
        num_running=committed.num_running,
        num_rows=len(seqs),
        tokens=len(plain.seqs) + sum([len(row.output) for row in emitted]),
        at=committed.now,
        drafted=sum([bool(row.draft) for row in others]),
        # Rows' first steps, however short, may follow on any time without work.
        comparable=len(prompts) < len(seqs),
        prompt_s=tracker.policy.measured.steps.prompts_s(
            prompts, committed.step.num_tokens, seconds
        ),
        temperature=committed.temperature,
    )
    tracker.step_done([seq.drafting for seq in seqs], step, decoded=committed.decoding)
    return tuple(told), columns


def _hears_early(seq: Sequence) -> bool:
    """Return whether a proposer drafts for the next round, and may hear of tokens first."""
    d = seq.drafting
    return d.offered.proposer.hears_early and d.num_draft_tokens > 0


def _due(seq: Sequence) -> bool:
    """Return whether the plain tokens that were held back are reported now."""
    number = len(seq.token_ids) - seq.num_reported
    return number >= seq.report_interval or seq.drafting.proposer.reported_to


def _held_back(seq: Sequence) -> Commit:
    """Return what `_finalize_row` does of plain tokens."""
    base_len, token_ids = seq.num_reported, seq.token_ids
    seq.num_reported = len(token_ids)
    tokens = tuple(token_ids[base_len:])
    kinds = PLAIN * len(tokens)
    return Commit(seq.session_id, base_len, tokens, kinds, seq.drafting.num_draft_tokens)


def _waits(row: Emitted) -> bool:
    """Return whether plain tokens are reported later, with others that follow.

    Never those of a row whose proposer must hear of each round by these reports.
    """
    seq = row.seq
    if row.finish_reason or seq.drafting.proposer.reported_to:
        return False
    length = row.base_len + len(row.output)
    return length - seq.num_reported < seq.report_interval and row.base_len > seq.num_prompt_tokens


def _finalize_row(tracker: DraftTracker, row: Emitted) -> Commit:
    seq, base_len, output, round_, _, finish_reason, logprobs, draft = row
    request, first = seq.request, base_len == seq.num_prompt_tokens
    kinds = token_kinds(round_.tried, round_.accepted, len(output))
    if seq.report_interval > 1 and (waited := base_len - seq.num_reported) > 0:
        kinds = PLAIN * waited + kinds
        output = (*seq.token_ids[seq.num_reported : base_len], *output)
        base_len = seq.num_reported
    seq.num_reported = base_len + len(output)
    if finish_reason:
        tracker.learn([seq])  # from others when they go on
    prompt_logprobs = None
    if first and request.prompt_logprobs is not None:
        prompt_logprobs = to_prompt_logprobs(seq.prompt_logprobs, request.prompt_logprobs)
        seq.prompt_logprobs = []
    return Commit(  # by position: that is much faster
        seq.session_id,
        base_len,
        output,
        kinds,
        0 if finish_reason else seq.drafting.num_draft_tokens,
        finish_reason,
        seq.stats() if finish_reason or request.running_stats else None,
        logprobs[: len(output)],
        seq.stop_token_id,
        prompt_logprobs,
        draft,
    )
