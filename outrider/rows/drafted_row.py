"""A request's committed tokens and the draft at hand for it, in any engine."""

from __future__ import annotations

from collections import Counter

from outrider.counts import sum_rounds
from outrider.draft_tree import DraftTree
from outrider.params import TokenIds
from outrider.policy.row import Drafting
from outrider.rounds import USEFUL, BlockFate, Counters
from outrider.types import FinishReason, MethodCounts, Request, RequestStats


class DraftedRow:
    """A request that an engine decodes, with its drafts; implements `outrider.policy.base.Row`.

    `token_ids` is prompt plus committed output.
    """

    __slots__ = (
        *("counters", "draft", "draft_base", "draft_method", "draft_node", "drafting", "max_len"),
        *("num_prompt_tokens", "request", "session_id", "stop_ids", "stop_token_id", "token_ids"),
    )

    def __init__(
        self, request: Request, *, max_len: int, stop_ids: frozenset[int], drafting: Drafting
    ) -> None:
        self.request = request
        self.session_id = request.session_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_len = max_len  # committed tokens it can reach
        self.stop_ids = stop_ids
        self.stop_token_id: int | None = None  # that ended it
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.draft: DraftTree | None = None  # None if nothing is left below the node
        self.draft_node = -1  # the node of `draft` that the last committed token reached
        self.draft_base = -1  # base_len of the last block that was kept
        self.draft_method = ""  # what drafted that block
        self.drafting = drafting
        self.counters = Counters()

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def trim(self, tokens: TokenIds) -> tuple[TokenIds, FinishReason | None]:
        """Return the part of new `tokens` that is output, and the reason to end with it, if any.

        Stop tokens come before the length; the stop token itself is not output.
        """
        if not self.stop_ids.isdisjoint(tokens):
            first = next(i for i, token in enumerate(tokens) if token in self.stop_ids)
            self.stop_token_id = tokens[first]
            return tokens[:first], FinishReason.STOP
        room = self.max_len - len(self.token_ids)
        if len(tokens) >= room:
            return tokens[:room], FinishReason.LENGTH
        return tokens, None

    def take_block(self, block: DraftTree, method: str = "") -> BlockFate:
        """Walk a block by what was committed since, and keep it if something is left below.

        A block from an older base than the present draft's does not replace it, nor does a smaller
        one from the same: branches arrive after the chain that they belong to.
        """
        length, base_len = len(self.token_ids), block.base_len
        if base_len == length and block.token_ids:  # as most are, of a proposer in time
            node = -1
        elif not 0 <= base_len <= length:
            return BlockFate.INVALID
        else:
            since = self.token_ids[base_len:]
            reached = block.descend(since)
            if reached is None:
                return BlockFate.LATE if block.is_outrun(since) else BlockFate.WRONG
            if block.is_leaf(reached):
                return BlockFate.LATE
            node = reached
        draft, draft_base = self.draft, self.draft_base
        if draft is not None:
            smaller = len(block.token_ids) < len(draft.token_ids)
            if base_len < draft_base or (base_len == draft_base and smaller):
                return USEFUL
        self.draft, self.draft_node, self.draft_base = block, node, base_len
        self.draft_method = method
        return USEFUL

    def hold_place(self, block: DraftTree) -> None:
        """Keep a block of tokens after the whole text, which the device's draft will replace."""
        self.draft, self.draft_node, self.draft_base = block, -1, block.base_len
        self.draft_method = ""

    def walk(self, base_len: int, emitted: TokenIds, drafted: int) -> bool:
        """Walk the draft by committed tokens; True if a guess for the next round was wrong.

        A guess is what a proposer that runs ahead drafted past this round, in which `drafted`
        tokens were verified. Without one the next draft can only be late, not wrong.
        """
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

    def stats(self) -> RequestStats:
        """Return the request's account so far."""
        c = self.counters
        rounds: Counter[tuple[int, int]] = Counter({(0, 0): c.undrafted} if c.undrafted else {})
        by_method: dict[str, list[int]] = {}
        drafts_by_context, accepted_by_context = Counter[int](), Counter[int]()
        for (drafted, accepted, _, method, context), number in c.drafted_rounds.items():
            rounds[drafted, accepted] += number
            drafts_by_context[context] += number
            accepted_by_context[context] += accepted * number
            of_method = by_method.setdefault(method, [0, 0])
            of_method[0] += drafted * number
            of_method[1] += accepted * number
        by_method.pop("", None)  # a draft whose method is unknown
        sums = sum_rounds(rounds)
        return RequestStats(
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_output_tokens,
            iter_count=c.iter_count,
            rounds=rounds.total(),
            drafted=sums.drafted,
            accepted=sums.accepted,
            accepted_per_pos=_as_list(sums.by_position),
            drafts_per_context=_as_list(drafts_by_context),
            accepted_per_context=_as_list(accepted_by_context),
            k_histogram=_as_list(sums.by_k),
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
            by_method=tuple(MethodCounts(name, *counts) for name, counts in by_method.items()),
        )


def _as_list(counts: Counter[int]) -> tuple[int, ...]:
    """Return the counts of 0, 1, ... up to the last that is there."""
    return tuple(counts[i] for i in range(max(counts, default=-1) + 1))
