"""A request while the engine works on it. Only the scheduler changes a sequence."""

from __future__ import annotations

from outrider.counts import sum_rounds
from outrider.draft_tree import DraftTree
from outrider.engine.kv_cache.block_pool import PageHash, extend_hashes
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.engine.sampling.logits import LogitsEditor, make_adjuster, make_editors
from outrider.params import TokenIds, VerificationRule
from outrider.policy.row import Drafting
from outrider.rounds import USEFUL, BlockFate, Counters
from outrider.types import FinishReason, MethodCounts, Request, RequestStats


class Sequence:
    """Committed tokens of a request, and the pages that hold their keys and values.

    `token_ids` is prompt plus committed output. Positions below `num_computed` have keys and
    values in the pages of `block_table`. A sequence that has caught up lacks exactly one: its last
    token, whose forward yields the next.
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
        # Editors of the logits run in this order, and then the adjuster.
        masks: tuple[LogitsEditor, ...] = () if constraint is None else (constraint,)
        self.editors = (*masks, *make_editors(request, stop_ids))
        self.adjuster = make_adjuster(request)
        self.edits_logits = bool(self.editors) or self.adjuster is not None
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_computed = 0
        self.block_table: list[int] = []
        self.page_hashes: list[PageHash] = []  # of full pages of token_ids, as far as needed
        self.num_published = 0
        self.draft: DraftTree | None = None  # None if nothing is left below the node
        self.draft_node = -1  # the node of `draft` that the last committed token reached
        self.draft_base = -1  # base_len of the last block that was kept
        self.draft_method = ""  # what drafted that block
        self.stop_token_id: int | None = None  # that ended it
        self.drafting = drafting
        self.counters = Counters()
        self.submitted_at = submitted_at
        self.queued_at = submitted_at  # again, when it is preempted
        self.admitted = False

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def hashes(self, num_pages: int, page_size: int) -> list[PageHash]:
        """Return chained hashes of the first `num_pages` pages of `token_ids`."""
        extend_hashes(self.page_hashes, self.token_ids, num_pages, page_size)
        return self.page_hashes[:num_pages]

    def take_block(self, block: DraftTree, method: str = "") -> BlockFate:
        """Walk a block by what was committed since, and keep it if something is left below.

        A block from an older base than the present draft's does not replace it, nor does a smaller
        one from the same: branches arrive after the chain that they belong to.
        """
        if not 0 <= block.base_len <= len(self.token_ids):
            return BlockFate.INVALID
        since = self.token_ids[block.base_len :]
        node = block.descend(since)
        if node is None:
            return BlockFate.LATE if block.is_outrun(since) else BlockFate.WRONG
        if block.is_leaf(node):
            return BlockFate.LATE
        if self.draft is None or (block.base_len, len(block.token_ids)) >= (
            self.draft_base,
            len(self.draft.token_ids),
        ):
            self.draft, self.draft_node, self.draft_base = block, node, block.base_len
            self.draft_method = method
        return USEFUL

    @property
    def needs_eager_sampling(self) -> bool:
        """Tell whether sampling takes more than is captured: edits, another rule or logprobs."""
        coupled = self.request.verification_rule is VerificationRule.COUPLED
        return self.edits_logits or not coupled or self.request.top_logprobs is not None

    def commit(self, emitted: TokenIds, drafted: int) -> bool:
        """Append tokens and walk the draft by them; True if a guess for the next round was wrong.

        A guess is what a proposer that runs ahead drafted past this round, in which `drafted`
        tokens were verified. Without one the next draft can only be late, not wrong.
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
            return False
        size = len(draft.token_ids)
        has_branches = size > drafted and size > self.drafting.num_draft_tokens
        return has_branches and self.draft_base >= base_len

    def trim(self, choices: TokenIds) -> tuple[TokenIds, FinishReason | None]:
        """Return the part of `choices` that is output, and the reason to end with it, if any.

        Stop tokens come before the length; the stop token itself is not output. Choices after the
        end of a constrained text do not count.
        """
        if self.constraint is not None:
            choices = choices[: self.constraint.end]
        if not self.stop_ids.isdisjoint(choices):
            first = next(i for i, token in enumerate(choices) if token in self.stop_ids)
            self.stop_token_id = choices[first]
            return choices[:first], FinishReason.STOP
        room = self.max_len - len(self.token_ids)
        if len(choices) >= room:
            return choices[:room], FinishReason.LENGTH
        return choices, None

    def stats(self) -> RequestStats:
        """Return the request's account so far."""
        c = self.counters
        sums = sum_rounds(c.rounds)
        return RequestStats(
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_output_tokens,
            iter_count=c.iter_count,
            rounds=c.rounds.total(),
            drafted=sums.drafted,
            accepted=sums.accepted,
            accepted_per_pos=tuple(sums.by_position[i] for i in range(len(sums.by_position))),
            k_histogram=tuple(sums.by_k[k] for k in range(max(sums.by_k, default=-1) + 1)),
            hits=c.fates["hit"],
            misses_late=c.fates["late"],
            misses_wrong=c.fates["wrong"],
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
