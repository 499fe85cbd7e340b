"""A request while the engine works on it. Only the scheduler changes a sequence."""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from outrider.draft_tree import DraftTree
from outrider.engine.block_pool import ROOT_HASH, PageHash, page_hash
from outrider.engine.constraint import ConstraintEditor
from outrider.engine.logits import LogitsEditor, make_adjuster, make_editors
from outrider.params import TokenIds
from outrider.types import FinishReason, MethodCounts, Request, RequestStats, TokenKind


class BlockFate(enum.Enum):
    """What became of a block when it was walked by the committed tokens."""

    USEFUL = "useful"
    LATE = "late"  # true so far, but nothing is left of it
    WRONG = "wrong"  # the truth does not lie on it
    INVALID = "invalid"  # it builds on tokens that were never committed


USEFUL = BlockFate.USEFUL  # Python 3.11 takes longer to find a member than to compare it


@dataclass(slots=True)
class Counters:
    """What is summed up for `RequestStats`; seconds here, milliseconds there."""

    iter_count: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds_by_drafted: Counter[int] = field(default_factory=Counter)
    rounds_by_accepted: Counter[int] = field(default_factory=Counter)
    hits: int = 0
    misses_late: int = 0
    misses_wrong: int = 0
    waits: int = 0
    wait_s: float = 0.0
    fallback_rounds: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    propose_s: float = 0.0
    score_s: float = 0.0
    network_s: float = 0.0
    cached_prompt_tokens: int = 0
    proposer_ids: list[str] = field(default_factory=list)
    preemptions: int = 0
    after_hit: list[int] = field(default_factory=lambda: [0, 0])  # misses, hits
    after_miss: list[int] = field(default_factory=lambda: [0, 0])
    by_method: dict[str, tuple[int, int]] = field(default_factory=dict)  # drafted, accepted

    def count_round(self, drafted: int, accepted: int, method: str) -> None:
        """One round that emitted something; `accepted` after trimming. `method` drafted."""
        if drafted and method:
            before = self.by_method.get(method, (0, 0))
            self.by_method[method] = (before[0] + drafted, before[1] + accepted)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.rounds_by_drafted[drafted] += 1
        self.rounds_by_accepted[accepted] += 1


class Round(NamedTuple):
    """What became of a row's draft in one step."""

    drafted: int  # tokens verified: of a tree all nodes
    depth: int  # of them after one another at most; a chain: all
    accepted: int  # of a tree the nodes of one path
    rejected: bool  # something was drafted where the accepted tokens end; not what came

    @property
    def tried(self) -> int:
        """Places at which the draft was right or wrong: later ones say nothing."""
        return self.accepted + self.rejected


@lru_cache(maxsize=4096)
def chain_round(drafted: int, accepted: int) -> Round:
    """The round of a chain."""
    return Round(drafted, drafted, accepted, accepted < drafted)


@dataclass(slots=True)
class Drafting:
    """What the policy knows about one row's proposer. Only the policy changes it."""

    limit: int  # K at most, as the request and the configuration allow
    proposer_id: str | None = None
    drafter: str = ""  # the proposer with its method that drafted last: what takes its own time
    proposer_limit: int = 0
    can_run_ahead: bool = False  # the proposer
    runs_ahead: bool = False  # and does
    num_draft_tokens: int = 0  # K of the next round
    commits: deque[tuple[int, float, bool]] = field(default_factory=lambda: deque(maxlen=8))
    """(committed length, when, whether no draft was left) of the last rounds: a block's base_len
    says which it answers."""
    committed_at: float = 0.0
    looked_at: float | None = None  # when the present round was first considered
    at_hand: bool = False  # a draft was there at that moment
    deadline: float = 0.0  # the present round waits no longer than this
    wrong: bool = False  # a guess for the present round did not lie on the committed path
    unlearned: Round | None = None  # the last round, until the policy has learned from it
    no_guess_at: int = -1  # committed length for which the proposer said it has no guess
    misses: int = 0  # rounds in a row without a draft, waited for in vain
    rest: int = 0  # rounds until a proposer that was set aside is waited for again
    next_rest: int = 0
    blocks: int = 0  # that came from the present proposer
    awaited_since: float = 0.0  # when the first of them could be used, if it had come
    successes: float = 0.0  # draft tokens accepted, fading
    trials: float = 0.0  # draft tokens accepted or rejected, fading
    levels: float = 1.0  # depth of a draft per token of it, fading; a chain's is 1
    probing: bool = False  # the next round drafts more than seems best, to find out
    wait_s: float = 0.0  # moving average of a round's wait
    hit: bool | None = None  # whether the last round that wanted a draft had one at once
    hit_share: float = 0.0  # of such rounds, fading
    free_tokens: float = 0.0  # accepted per round from drafts that were at hand at once, fading


class Sequence:
    """Committed tokens, how many of them are computed, and the pages that hold their KV.

    `token_ids` is the truth: prompt plus committed output. Positions below `num_computed` have
    keys and values in the pages of `block_table`. A sequence that has caught up lacks exactly
    one: its last token, whose forward yields the next.
    """

    def __init__(
        self,
        request: Request,
        *,
        max_len: int,
        stop_ids: frozenset[int],
        drafting: Drafting,
        submitted_at: float,
        constraint: ConstraintEditor | None = None,
    ) -> None:
        self.request = request
        self.session_id = request.session_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_len = max_len  # committed tokens it can reach
        self.stop_ids = stop_ids
        self.constraint = constraint
        # Of its logits, in this order, and then the adjuster; plain requests have neither.
        masks: tuple[LogitsEditor, ...] = () if constraint is None else (constraint,)
        self.editors = (*masks, *make_editors(request, stop_ids))
        self.adjuster = make_adjuster(request)
        self.edits_logits = bool(self.editors) or self.adjuster is not None
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_computed = 0
        self.block_table: list[int] = []
        self.page_hashes: list[PageHash] = []  # of full pages of token_ids, as far as needed
        self.num_published = 0
        self.draft: DraftTree | None = None  # None if nothing of it is left
        self.draft_node = -1  # the node of `draft` that the last committed token reached
        self.draft_base = -1  # base_len of the last block that was kept
        self.draft_method = ""  # what drafted that block
        self.drafting = drafting
        self.counters = Counters()
        self.submitted_at = submitted_at
        self.queued_at = submitted_at  # again, when it is preempted
        self.admitted = False

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def caught_up(self) -> bool:
        """Only the last token, which the previous step emitted, lacks KV."""
        length = len(self.token_ids)
        return self.num_computed == length - 1 and length > self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def hashes(self, num_pages: int, page_size: int) -> list[PageHash]:
        """Chained hashes of the first `num_pages` pages of `token_ids`."""
        known = self.page_hashes
        while len(known) < num_pages:
            start = len(known) * page_size
            parent = known[-1] if known else ROOT_HASH
            known.append(page_hash(parent, self.token_ids[start : start + page_size]))
        return known[:num_pages]

    def take_block(self, block: DraftTree, method: str = "") -> BlockFate:
        """Walks a block by what was committed since, and keeps it if something is left below.

        A block from an older base than the present draft's does not replace it, nor does a smaller
        one from the same: branches follow the chain that they belong to.
        """
        if not 0 <= block.base_len <= len(self.token_ids):
            return BlockFate.INVALID
        node = block.descend(self.token_ids[block.base_len :])
        if node is None:
            return BlockFate.WRONG
        if block.is_leaf(node):
            return BlockFate.LATE
        if self.draft is None or (block.base_len, len(block.token_ids)) >= (
            self.draft_base,
            len(self.draft.token_ids),
        ):
            self.draft, self.draft_node, self.draft_base = block, node, block.base_len
            self.draft_method = method
        return USEFUL

    def commit(self, emitted: TokenIds, drafted: int) -> bool:
        """Appends tokens and walks the draft by them. True if they fell off: a wrong guess.

        Where the proposer runs ahead, and nothing past the draft of this round (`drafted` tokens
        were verified) had come yet, there was no guess to be wrong: it is late.
        """
        base_len = len(self.token_ids)
        self.token_ids += emitted
        if self.edits_logits:
            for editor in self.editors:
                editor.commit(emitted)
            if self.adjuster is not None:
                self.adjuster.commit(emitted)
        draft = self.draft
        if draft is None:
            return False
        node = draft.descend(emitted, self.draft_node)
        if node is not None and not draft.is_leaf(node):
            self.draft_node = node
            return False
        self.draft = None
        if node is not None or not self.drafting.runs_ahead:
            return node is None
        size = len(draft.token_ids)
        has_branches = size > drafted and size > self.drafting.num_draft_tokens
        return has_branches and self.draft_base >= base_len

    def trim(self, choices: TokenIds) -> tuple[TokenIds, FinishReason | None]:
        """What of `choices` is output, and whether the request ends with it.

        Stop tokens first (the stop token itself is not output), then the length. What comes after
        the end of a constrained text is no choice.
        """
        if self.constraint is not None:
            choices = choices[: self.constraint.end]
        if not self.stop_ids.isdisjoint(choices):
            first = next(i for i, token in enumerate(choices) if token in self.stop_ids)
            return choices[:first], FinishReason.STOP
        room = self.max_len - len(self.token_ids)
        if len(choices) >= room:
            return choices[:room], FinishReason.LENGTH
        return choices, None

    def stats(self) -> RequestStats:
        """The request's account so far."""
        c = self.counters
        return RequestStats(
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_output_tokens,
            iter_count=c.iter_count,
            rounds=c.rounds,
            drafted=c.drafted,
            accepted=c.accepted,
            accepted_per_pos=tuple(
                sum(n for accepted, n in c.rounds_by_accepted.items() if accepted > position)
                for position in range(max(c.rounds_by_accepted, default=0))
            ),
            k_histogram=tuple(
                c.rounds_by_drafted[k] for k in range(max(c.rounds_by_drafted, default=-1) + 1)
            ),
            hits=c.hits,
            misses_late=c.misses_late,
            misses_wrong=c.misses_wrong,
            waits=c.waits,
            wait_ms=c.wait_s * 1e3,
            fallback_rounds=c.fallback_rounds,
            queue_ms=c.queue_s * 1e3,
            prefill_ms=c.prefill_s * 1e3,
            propose_ms=c.propose_s * 1e3,
            score_ms=c.score_s * 1e3,
            network_ms=c.network_s * 1e3,
            cached_prompt_tokens=c.cached_prompt_tokens,
            proposer_ids=tuple(c.proposer_ids),
            preemptions=c.preemptions,
            rounds_after_hit=sum(c.after_hit),
            hits_after_hit=c.after_hit[True],
            rounds_after_miss=sum(c.after_miss),
            hits_after_miss=c.after_miss[True],
            verification=self.request.speculation.verification.rule,
            by_method=tuple(MethodCounts(name, *counts) for name, counts in c.by_method.items()),
        )


@lru_cache(maxsize=4096)
def token_kinds(tried: int, accepted: int, emitted: int) -> tuple[TokenKind, ...]:
    """Where each of `emitted` tokens of a round came from; see `Round`."""
    if not tried:
        last = TokenKind.PLAIN
    else:
        last = TokenKind.BONUS if accepted == tried else TokenKind.RECOVERED
    return ((TokenKind.ACCEPTED,) * accepted + (last,))[:emitted]
