"""A request while the engine works on it. Only the scheduler changes a sequence."""

from __future__ import annotations

from outrider.engine.kv_cache.block_pool import PageHash, extend_hashes
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.engine.sampling.logits import LogitsEditor, make_adjuster, make_editors
from outrider.params import TokenIds, VerificationRule
from outrider.policy.row import Drafting
from outrider.rows.drafted_row import DraftedRow
from outrider.types import Request


class Sequence(DraftedRow):
    """Committed tokens of a request, and the pages that hold their keys and values.

    Positions below `num_computed` have keys and values in the pages of `block_table`. A sequence
    that has caught up lacks exactly one: its last token, whose forward yields the next.
    """

    __slots__ = (
        *("adjuster", "admitted", "block_table", "constraint", "coupled", "editors"),
        *("edits_logits", "needs_eager_sampling", "num_published", "num_reported"),
        *("num_uncomputed", "page_hashes", "plain_below"),
        *("prompt_logprobs", "queued_at", "report_interval", "submitted_at", "temperature"),
    )

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
        super().__init__(request, max_len=max_len, stop_ids=stop_ids, drafting=drafting)
        self.constraint = constraint
        # Editors of the logits run in this order, and then the adjuster.
        masks: tuple[LogitsEditor, ...] = () if constraint is None else (constraint,)
        self.editors = (*masks, *make_editors(request, stop_ids))
        self.adjuster = make_adjuster(request)
        self.edits_logits = bool(self.editors) or self.adjuster is not None
        rule = request.verification_rule
        self.coupled = rule is VerificationRule.COUPLED
        self.needs_eager_sampling = (
            self.edits_logits or not rule.captured or request.top_logprobs is not None
        )
        """Sampling takes more than is captured: edits, another rule or logprobs."""
        shown = request.draft_trees or request.top_logprobs is not None
        plain = not (shown or self.edits_logits or constraint or request.running_stats)
        self.plain_below = max_len - 1 if plain else 0
        """In shorter texts a token without a draft needs no more than its place."""
        self.temperature = request.sampling.temperature
        self.num_uncomputed = len(self.token_ids)  # of a text that decodes it stays 1
        self.block_table: list[int] = []
        self.page_hashes: list[PageHash] = []  # of full pages of token_ids, as far as needed
        self.num_published = 0
        self.prompt_logprobs: list[list[float]] = []  # of computed tokens, until they are reported
        self.report_interval = 0 if shown else request.stream_interval
        """A `Commit` has as many plain tokens at least, but for the first and the last."""
        self.num_reported = len(self.token_ids)  # that a `Commit` has told of, if above 1
        self.submitted_at = submitted_at
        self.queued_at = submitted_at  # again, when it is preempted
        self.admitted = False

    @property
    def num_computed(self) -> int:
        return len(self.token_ids) - self.num_uncomputed

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        self.num_uncomputed = len(self.token_ids) - count

    @property
    def wants_prompt_logits(self) -> bool:
        """Tell whether logits of the prompt are to be computed, or were and are lost.

        They lead to the first output, so pages of the prefix cache are of no use until then.
        """
        return self.request.prompt_logprobs is not None and not self.num_output_tokens

    def hashes(self, num_pages: int, page_size: int) -> list[PageHash]:
        """Return chained hashes of the first `num_pages` pages of `token_ids`, maybe of more."""
        extend_hashes(self.page_hashes, self.token_ids, num_pages, page_size)
        return self.page_hashes

    def commit(self, emitted: TokenIds, drafted: int) -> bool:
        """Append tokens and `walk` the draft by them."""
        base_len = len(self.token_ids)
        self.token_ids += emitted
        if self.edits_logits:
            for editor in self.editors:
                editor.commit(emitted)
            if self.adjuster is not None:
                self.adjuster.commit(emitted)
        return self.draft is not None and self.walk(base_len, emitted, drafted)
