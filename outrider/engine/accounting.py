"""What steps and blocks add to their rows' accounts, and the events that tell of it.

No step's tokens follow from any of this, so it is done while the device works on the next one.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.draft_tree import DraftTree
from outrider.engine.policy.base import Policy
from outrider.engine.policy.timing import StepDone
from outrider.engine.rounds import BlockFate, Round, token_kinds
from outrider.engine.sequence import Sequence
from outrider.engine.step import Step
from outrider.params import TokenIds
from outrider.types import Commit, Failure, FinishReason, TokenLogprobs

Arrived = tuple[Sequence, DraftTree, BlockFate, str, str, float, float]
"""Arguments of `count_block`, of a block that came for a row."""


Emitted = tuple[
    Sequence, int, TokenIds, Round, str, str, FinishReason | None, tuple[TokenLogprobs, ...]
]
"""What `settle` takes, of what a step made true for a row: see `_settle_row`."""


class Committed(NamedTuple):
    """What a step made true."""

    step: Step
    emitted: tuple[Emitted, ...]
    failures: tuple[Failure, ...]  # of requests whose constraint leads nowhere
    num_running: int  # rows that were admitted
    temperature: float  # their mean
    decoding: bool  # no prompt was processed
    seconds: float  # from the step's launch to its result
    now: float  # of the result


def count_block(
    policy: Policy,
    seq: Sequence,
    block: DraftTree,
    fate: BlockFate,
    proposer_id: str,
    method: str,
    draft_s: float,
    at: float,
) -> None:
    """Lets the policy learn from a block that came at `at`, and counts the time that it took."""
    delay = policy.block_arrived(seq, block, fate, draft_s, at, method)
    counters, counts = seq.counters, policy.counts
    counters.propose_s += draft_s
    counts.propose_s += draft_s
    if delay > draft_s:
        counters.network_s += delay - draft_s
        counts.network_s += delay - draft_s
    if proposer_id not in counters.proposer_ids:
        counters.proposer_ids.append(proposer_id)


def settle(policy: Policy, committed: Committed) -> tuple[Commit, ...]:
    """Count a step's rounds, and lets the policy learn from them; for each row once."""
    commits = tuple([_settle_row(policy, committed, *row) for row in committed.emitted])
    tokens = sum([len(commit.token_ids) for commit in commits])
    rows, counts = committed.step.rows, policy.counts
    drafting = [row.seq.drafting for row in rows]
    counts.output_tokens += tokens
    if committed.decoding:
        plain_s = policy.plain_step_s(len(rows))
        counts.plain_s += plain_s * counts.output_tokens / len(rows)
    prompts = [len(r.slice.token_ids) for r in rows if r.slice.start < r.seq.num_prompt_tokens]
    prompt_tokens = sum(prompts)
    done = StepDone(
        num_running=committed.num_running,
        num_rows=len(rows),
        tokens=tokens,
        at=committed.now,
        drafted=sum([bool(row.draft) for row in rows]),
        # Rows' first steps, however short, may follow on any time without work.
        comparable=len(prompts) < len(rows) and any(d.proposer_id is not None for d in drafting),
        prompt_tokens=prompt_tokens,
        prompts_only=committed.step.prompts_only,
        temperature=committed.temperature,
        followed=sum([d.blocks > 0 for d in drafting]),
        may_run_ahead=any(d.can_run_ahead for d in drafting),
    )
    counts.way = policy.way.value
    policy.step_done(done)
    return commits


def _settle_row(
    policy: Policy,
    committed: Committed,
    seq: Sequence,
    base_len: int,  # committed tokens before the step
    output: TokenIds,
    round_: Round,
    proposer_id: str,  # that drafted,
    method: str,  # and how
    finish_reason: FinishReason | None,
    logprobs: tuple[TokenLogprobs, ...],
) -> Commit:
    counters, counts = seq.counters, policy.counts
    first = base_len == seq.num_prompt_tokens
    drafted, accepted = round_.drafted, round_.accepted
    if accepted > len(output):  # after trimming
        accepted = len(output)
    if output:
        counters.count_round(drafted, accepted, method)
        if drafted or not first:
            counts.rounds[drafted, accepted] += 1
        if drafted:
            counts.drafted_by[proposer_id] += drafted
            counts.accepted_by[proposer_id] += accepted
    if not first:
        counters.score_s += committed.seconds
        counts.score_s += committed.seconds
    if finish_reason:
        policy.learn(seq)  # from others when they go on
    return Commit(  # by position: a tenth of the time that it takes to settle a row
        seq.session_id,
        base_len,
        output,
        token_kinds(round_.tried, round_.accepted, len(output)),
        0 if finish_reason else seq.drafting.num_draft_tokens,
        finish_reason,
        seq.stats() if finish_reason or seq.request.running_stats else None,
        logprobs[: len(output)],
    )
