"""Choose the rows of the next step, and commit a step's result.

With its base class, the scheduler is the only writer of sequences.

There is no prefill phase and no decode phase. Every sequence has known tokens and computed
tokens; a step gives each ready row a share of the token budget until computed catches up with
known + draft. Chunked prefill, decode and verification are the same case, in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace

from torch import Tensor

from outrider.draft_tree import chain_parents
from outrider.engine.accounting import NO_PLAIN_ROWS, Committed, Emitted, PlainRows
from outrider.engine.batch import RowSlice
from outrider.engine.queues import Queues
from outrider.engine.sampling.logprobs import narrow
from outrider.engine.sequence import Sequence
from outrider.engine.step import (
    NO_DRAFT,
    TO_BE_DRAWN,
    ChosenDraft,
    DrawnTokens,
    ScheduledRow,
    SingleRows,
    Step,
    StepResult,
    choose_draft,
)
from outrider.policy.base import Ready
from outrider.rounds import UNDRAFTED, Round, chain_round
from outrider.types import Failure, VerifiedDraft


class Scheduler(Queues):
    """Shares one budget of tokens per step among the requests that run."""

    def schedule(self, now: float) -> Step | None:
        """Return the next step; None if no row is ready before `wake_at`."""
        self._now = now
        self._admit()
        self.wake_at = float("inf")
        # Texts of their greatest length have their last token drawn by the step in flight.
        decoding = [
            seq
            for seq in self.running
            # Only the last token, which the previous step emitted, lacks KV.
            if seq.num_uncomputed == 1 and seq.num_prompt_tokens < len(seq.token_ids) < seq.max_len
        ]
        prefilling: list[Sequence] = []
        if len(decoding) < len(self.running):
            caught_up = set(decoding)
            prefilling = [
                seq
                for seq in self.running
                if seq not in caught_up and len(seq.token_ids) < seq.max_len
            ]
        ready = Ready(decoding, self.wake_at)
        if decoding:
            ready = self.tracker.choose_rows(decoding, len(prefilling), now)
            self.wake_at = ready.wake_at
            if not ready.rows and self.wake_at > now:
                return None
        singles, others = self._fill(ready.rows, prefilling)
        if not (singles or others):
            return None
        self.wake_at = now
        num_tokens = len(singles) + sum([len(row.slice.token_ids) for row in others])
        return Step(tuple(others), num_tokens, singles=SingleRows(singles))

    def schedule_ahead(self, step: Step, verified: Tensor, now: float) -> Step | None:
        """Return the step behind `step`, which is in flight and leaves its tokens in `verified`.

        None unless all but the tokens themselves is known: nobody drafts, and no row's choice
        depends on the token before. A row that turns out to have ended runs in vain.
        """
        if step.has_drafts:
            return None
        if (same := self._same_ahead(step, verified, now)) is not None:
            return same
        drafting = self._drafting
        for seq in self.running if self.tracker.may_draft else ():
            if seq.drafting.num_draft_tokens and not drafting:
                self.tracker.withhold(seq)
            if seq.draft is not None or seq.drafting.num_draft_tokens:
                return None
        others = [row for row in step.others if row.seq.admitted]
        drawing = [seq for seq in step.singles.seqs if seq.admitted]
        drawing += [row.seq for row in others if row.slice.num_logits]
        if [seq for seq in drawing if seq.edits_logits]:
            return None
        uncomputed = [(row.seq, row.seq.num_uncomputed) for row in others]
        for row in others:
            row.seq.num_uncomputed += bool(row.slice.num_logits) - len(row.slice.token_ids)
        for seq in drawing:
            seq.token_ids.append(TO_BE_DRAWN)
        try:
            page_size = self.config.page_size
            short = [s for s in self.running if len(s.token_ids) > len(s.block_table) * page_size]
            missing = [self._missing_pages(seq, len(seq.token_ids)) for seq in short]
            if sum(missing) > self.pool.num_free:
                return None  # a row in flight cannot be preempted
            following = self.schedule(now)
        finally:
            for seq in drawing:
                seq.token_ids.pop()
            for seq, number in uncomputed:
                seq.num_uncomputed = number
        if following is None:
            return None
        with_logits = step.singles.seqs + [row.seq for row in step.others if row.slice.num_logits]
        sources: Rows[int] = range(len(with_logits))
        if with_logits != (sequences := following.seqs):
            drawn_at = dict(zip(with_logits, sources, strict=True))
            sources = [drawn_at.get(seq, -1) for seq in sequences]
        if max(sources) < 0:
            return following
        return replace(following, drawn=DrawnTokens(verified, sources))

    def _same_ahead(self, step: Step, verified: Tensor, now: float) -> Step | None:
        """Return the step of the same rows, if all of them go on and no other comes; else None.

        It is what `schedule` would return, in a fifth of the time.
        """
        singles, page_size = step.singles, self.config.page_size
        may_admit = self.waiting and len(self.running) < self.config.max_num_seqs
        if self.tracker.may_draft or may_admit or step.others or singles.seqs != self.running:
            return None
        rows = zip(singles.seqs, singles.starts, strict=True)
        if [seq for seq, start in rows if start + 2 >= seq.max_len or seq.edits_logits]:
            return None
        following = singles.following()
        starts, tables = following.starts, following.tables
        at_page = [i for i, start in enumerate(starts) if not start % page_size]
        short = [tables[i] for i in at_page if starts[i] >= len(tables[i]) * page_size]
        if not singles.seqs or len(short) > self.pool.num_free:
            return None
        for table in short:
            table.append(self.pool.allocate())
        self.wake_at = now
        drawn = DrawnTokens(verified, range(len(following)))
        return Step((), len(following), drawn=drawn, singles=following)

    def launched(self, step: Step, now: float) -> tuple[int, ...]:
        """Note that a step is on its way. Return sessions whose proposer was awaited in vain."""
        if step.drawn is not None:
            drawn = zip(step.seqs, step.drawn.sources, strict=True)
            self.tracker.looked_at([seq for seq, source in drawn if source >= 0], now)
        rows = [(row.seq, len(row.draft)) for row in step.others]
        opened = self.tracker.launched(rows, now, undrafted=step.singles.seqs)
        return tuple([seq.session_id for seq in opened])

    def commit(self, step: Step, result: StepResult, seconds: float, now: float) -> Committed:
        """Commit a step's tokens to its sequences. It took `seconds` from its launch to its result.

        This does only what the next step follows from: `finalize_step` does the rest when that one
        is on its way.
        """
        decoding = self._decodes(step)
        if decoding:
            # Prompts say little about a round: on a GPU they run another way.
            self.tracker.policy.measured.steps.observe_step(step.num_rows, step.num_tokens, seconds)
        num_running = max(1, len(self.running))
        may_draft, drafting = self.tracker.may_draft, self._drafting
        temperatures = [seq.temperature for seq in self.running] if may_draft else []
        rest: Rows[int] = range(step.num_rows)
        plain = NO_PLAIN_ROWS
        if not step.all_drafted:
            tokens = [choices[0] if choices else 0 for choices in result.choices]
            rows = PlainRows(step.seqs, step.plain_lens, tokens)
            rest = self._grow(rows, drafting=drafting)
            plain = rows.without(rest)
        emitted: list[Emitted] = []
        failures: list[Failure] = []
        for i in self._commit_chains(step, result, rest, now, drafting, emitted):
            self._commit_row(step, result, i, now, drafting, emitted, failures)
        self.tracker.undrafted_done(plain.seqs, now)
        return Committed(
            step=step,
            plain=plain,
            emitted=tuple(emitted),
            failures=tuple(failures),
            num_running=num_running,
            temperature=sum(temperatures) / num_running,
            decoding=decoding,
            seconds=seconds,
            now=now,
        )

    def _grow(self, rows: PlainRows, *, drafting: bool) -> list[int]:
        """Add a token to the rows that do nothing else; return the places of the others."""
        page_size, may_be_asked = self.config.page_size, self.tracker.may_draft and not drafting
        rest: list[int] = []
        for i, (seq, length, token) in enumerate(zip(*rows, strict=True)):
            if (
                length < seq.plain_below
                and seq.draft is None
                and token not in seq.stop_ids
                and not (may_be_asked and seq.drafting.num_draft_tokens)
                and seq.admitted
            ):
                seq.token_ids.append(token)
                seq.num_uncomputed = 1
                if length // page_size > seq.num_published:
                    self._publish(seq)
            else:
                rest.append(i)
        return rest

    def _commit_chains(
        self,
        step: Step,
        result: StepResult,
        places: Rows[int],
        now: float,
        drafting: bool,
        emitted: list[Emitted],
    ) -> list[int]:
        """Commit the rows that verified a whole chain, and do nothing else.

        It is what `_commit_row` does, in a third of the time. Returns the places of other rows.
        """
        page_size, tracker = self.config.page_size, self.tracker
        first, on_host = len(step.singles), step.device_drafts is None
        rest: list[int] = []
        done: list[tuple[Sequence, Round, bool]] = []
        for i in places:
            if i < first:
                rest.append(i)
                continue
            seq, part, held, _, _ = step.others[i - first]
            accepted, base_len, draft = result.accepted[i], len(seq.token_ids), seq.draft
            if (
                draft is None
                or seq.draft_node >= 0  # some of the draft was committed before
                or part.parents  # a tree was verified, which another block has replaced since
                # Another block may have come, of which less or something else was verified.
                or (drafted := len(token_ids := draft.token_ids)) > len(held)
                or draft.parents is not chain_parents(drafted)
                or (on_host and token_ids != held)
                # More of the draft would be true than was verified.
                or (accepted < drafted and token_ids[accepted] == result.choices[i][accepted])
                # The first token of a text, or one that may end it, is more than plain.
                or not seq.num_prompt_tokens < base_len < seq.plain_below - accepted
                or not seq.stop_ids.isdisjoint(chosen := tuple(result.choices[i][: accepted + 1]))
                or not seq.admitted  # it ended while the step was in flight
            ):
                rest.append(i)
                continue
            seq.token_ids += chosen
            seq.num_uncomputed, seq.draft = 1, None
            if (base_len + accepted) // page_size > seq.num_published:
                self._publish(seq)
            d = seq.drafting
            if d.num_draft_tokens and not drafting:
                tracker.withhold(seq)
            round_, by = chain_round(drafted, accepted), d.offered.proposer.proposer_id or ""
            done.append((seq, round_, False))
            drafted_by = (by, seq.draft_method)
            emitted.append(Emitted(seq, base_len, chosen, round_, drafted_by, None, (), None))
        tracker.rounds_done(done, now)
        return rest

    def _commit_row(
        self,
        step: Step,
        result: StepResult,
        i: int,
        now: float,
        drafting: bool,
        emitted: list[Emitted],
        failures: list[Failure],
    ) -> None:
        """Commit row `i` of a step: its output goes to `emitted`, or why it ends to `failures`."""
        row, choices, accepted = step.row(i), result.choices[i], result.accepted[i]
        logprobs = result.logprobs[i] if result.logprobs else ()
        seq, base_len, finish_reason = row.seq, len(row.seq.token_ids), None
        if row.num_prompt_logits:
            values = result.prompt_logprobs[i]
            seq.prompt_logprobs += narrow(values, seq.request.prompt_logprobs or 0)
        if not seq.admitted:  # it ended while the step was in flight
            return
        # Rejected drafts need no undoing: their slots lie behind num_computed, in pages of this
        # row's own, and are written again by the tokens that follow. What was accepted of a tree
        # has already moved to the slots before them.
        computed = seq.num_computed + len(row.slice.token_ids) - len(row.draft) + accepted
        if choices:
            proposer_id, method = seq.drafting.proposer_id or "", seq.draft_method
            chosen = tuple(choices[: accepted + 1])
            known = row if step.device_drafts is None else row.posted
            round_ = UNDRAFTED
            if row.draft:
                round_ = known.round(chosen) if known else chain_round(len(row.draft), accepted)
            if seq.constraint is not None:
                chosen = chosen[: seq.constraint.end]
            output, finish_reason = seq.trim(chosen)
            wrong = seq.commit(output, round_.drafted)
            if seq.constraint is not None:
                finish_reason = seq.constraint.finish(finish_reason)
                if finish_reason is None:  # it may have cut off what was accepted
                    computed = min(computed, len(seq.token_ids) - 1)
            if base_len == seq.num_prompt_tokens:
                seq.counters.prefill_s = now - seq.submitted_at - seq.counters.queue_s
            if seq.drafting.num_draft_tokens and not drafting:
                self.tracker.withhold(seq)
            self.tracker.rounds_done([(seq, round_, wrong)], now)
            draft = None
            if seq.request.draft_trees and row.draft and known:
                draft = VerifiedDraft(base_len, known.draft, tuple(known.slice.parents))
            about = ((proposer_id, method), finish_reason, logprobs, draft)
            emitted.append(Emitted(seq, base_len, output, round_, *about))
        seq.num_computed = computed
        if computed // self.config.page_size > seq.num_published:
            self._publish(seq)
        if finish_reason is not None:
            self.remove(seq.session_id)
        elif seq.constraint is not None and seq.constraint.error is not None:
            self.remove(seq.session_id)
            failures.append(Failure(seq.session_id, seq.constraint.error))

    @property
    def _drafting(self) -> bool:
        """Tell whether drafts are made with as many requests as there are now."""
        num_requests = min(len(self.by_session), self.config.max_num_seqs)
        return self.tracker.policy.drafting_at(num_requests.bit_length())

    def _decodes(self, step: Step) -> bool:
        """Whether no row has more tokens than a round's."""
        k = self.config.num_speculative_tokens
        more = step.num_tokens - step.num_rows * (1 + k)
        return more <= 0 or more <= sum([max(0, len(row.draft) - k) for row in step.others])

    def _fill(
        self, decoding: list[Sequence], prefilling: list[Sequence]
    ) -> tuple[list[Sequence], list[ScheduledRow]]:
        """Share the token budget: a token for every decoding row, prompts, then drafts.

        Returns rows of a text's last token, if no row decodes with a draft, and all others.
        """
        budget = self.config.max_num_batched_tokens
        # Drafts must not starve prompts, nor prompts each other's oldest.
        reserve = min(sum(seq.num_uncomputed for seq in prefilling), max(1, budget // 4))
        max_draft = (budget - reserve) // max(1, len(decoding)) - 1
        rows: dict[int, ScheduledRow] = {}
        singles: list[Sequence] = []
        page_size, num_running = self.config.page_size, len(self.running)
        drafts = self._choose_drafts(decoding, max_draft)
        for seq in decoding:
            if not seq.admitted or budget <= reserve:  # preempted by a row before it
                continue
            if drafts:  # then all rows keep their order, and their places in captured steps
                chosen = drafts.get(seq.session_id, NO_DRAFT)
                row = self._place(seq, budget - reserve, chosen, rows)
                if row is not None:
                    rows[seq.session_id] = row
                    budget -= 1 + len(row.draft)
                continue
            length = len(seq.token_ids)
            if length <= len(seq.block_table) * page_size or self._cover(seq, length, rows):
                singles.append(seq)
                budget -= 1
        prompt_logits = self.config.max_prompt_logits
        for seq in prefilling:
            left = min(budget, prompt_logits) if seq.wants_prompt_logits else budget
            draft, spare = NO_DRAFT, left - seq.num_uncomputed
            if seq.draft is not None and spare >= 0:
                most = min(seq.drafting.num_draft_tokens, max_draft, spare)
                draft = choose_draft(seq, most)
            if left > 0 and seq.admitted and (row := self._place(seq, left, draft, rows)):
                rows[seq.session_id] = row
                budget -= len(row.slice.token_ids)
                prompt_logits -= row.num_prompt_logits
        if len(self.running) < num_running:
            singles = [seq for seq in singles if seq.admitted]
        return singles, list(rows.values())

    def _choose_drafts(self, decoding: list[Sequence], max_draft: int) -> dict[int, ChosenDraft]:
        """Return what is verified of each draft at hand, by its session.

        Drafts with confidences are cut to what these make worth verifying, over all rows at once.
        """
        chosen: dict[int, ChosenDraft] = {}
        for seq in decoding:
            if seq.draft is not None:
                n = seq.drafting.num_draft_tokens
                chosen[seq.session_id] = choose_draft(seq, n if n < max_draft else max_draft)
        told = [(self.by_session[i], draft) for i, draft in chosen.items() if draft.confidences]
        if told:
            untold = [len(draft.token_ids) for draft in chosen.values() if not draft.confidences]
            nodes = [(seq, draft.nodes) for seq, draft in told]
            cut = self.tracker.cut(nodes, len(decoding), len(decoding) + sum(untold))
            for (seq, draft), kept in zip(told, cut, strict=True):
                chosen[seq.session_id] = verified = draft.kept(kept)
                self.tracker.verifies(seq, verified.nodes)
        return chosen

    def _place(
        self, seq: Sequence, left: int, chosen: ChosenDraft, rows: dict[int, ScheduledRow]
    ) -> ScheduledRow | None:
        """Return a row of at most `left` tokens, with pages for them; None if there are none.

        With the `chosen` draft, if any, these are all that the text and the draft have.
        """
        length, page_size = len(seq.token_ids), self.config.page_size
        draft, parents, probs, _ = chosen
        if seq.num_uncomputed == 1 and length + len(draft) <= len(seq.block_table) * page_size:
            token_ids = (seq.token_ids[-1], *draft)  # as mostly
            part = RowSlice(token_ids, length - 1, seq.block_table, len(token_ids), parents)
            return ScheduledRow(seq, part, draft, probs)
        start = length - seq.num_uncomputed
        end = length if length - start <= left else start + left
        if end + len(draft) > len(seq.block_table) * page_size:
            if self._missing_pages(seq, end + len(draft)) > self.pool.num_free:
                draft, parents, probs, _ = NO_DRAFT  # no draft is worth another row's pages
            if not self._cover(seq, end + len(draft), rows):
                return None
        num_logits, num_prompt_logits = len(draft) + 1 if end == length else 0, 0
        token_ids = (*seq.token_ids[start:end], *draft)
        row_slice = RowSlice(token_ids, start, seq.block_table, num_logits, parents)
        if seq.num_uncomputed > 1 and seq.wants_prompt_logits:
            num_prompt_logits = max(0, min(end, seq.num_prompt_tokens - 1) - start)
        return ScheduledRow(seq, row_slice, draft, probs, num_prompt_logits)
