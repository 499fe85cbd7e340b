"""Drafts for steps that vLLM schedules before it knows what the one before emits.

With `--async-scheduling` vLLM prepares a step while the one before runs, with room for
`num_speculative_tokens` draft tokens in each row. It corrects positions on the device, once that
knows how many tokens were accepted. So drafts may come last, in one of three ways:

- The device chooses each row's draft by what the step before emitted, from a table of branches, or
  has made them behind that step. The step is launched before the host has read what was emitted,
  and the device need not wait for the host.
- The host reads what the step before emitted, commits it, and chooses the drafts. Then it launches
  the step. So it may wait for drafts.
- No row has room for drafts. The step is launched at once.

With tensor parallelism rank 0 says which way a step takes, and sends the drafts.

Between steps vLLM has placeholders for tokens that it has not read. Whatever it reads of a text to
choose tokens (lengths, penalties, `min_tokens`, grammars) is set right before it samples.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.vllm.adapter import (
    StepOutput,
    StepPlan,
    draft_places,
    draft_token_ids,
    leave_undrafted,
)
from outrider.vllm.ahead.branch_table import as_outcomes
from outrider.vllm.ahead.device_choice import NONE, Chooser, DeviceChoice, LaunchedStep
from outrider.vllm.ahead.draft_side import DraftSide
from outrider.vllm.min_tokens import held_by_texts


class StepsAhead:
    """Follows a model runner, and places drafts in its steps."""

    def __init__(
        self, runner: Any, side: DraftSide, max_num_seqs: int, num_draft_tokens: int
    ) -> None:
        """Replace methods of a runner that schedules ahead."""
        self._runner, self._side = runner, side
        self._last: LaunchedStep | None = None
        self._rooms: dict[str, int] = {}  # for draft tokens, by row of the step
        self._unchecked = False  # drafts would have room, but a grammar is not asked about them
        self._choice = DeviceChoice(side, max_num_seqs, num_draft_tokens, runner.device)
        self._plan: Any = None  # vLLM's `SchedulerOutput` of the step
        self._lengths: dict[str, int] = {}  # of the texts, prompts among them
        self._verified: Any = None  # vLLM's metadata of the draft tokens in the step
        self._draft_indices: Any = None  # of these among the step's tokens: int64 [draft tokens]
        self._drafts: tuple[list[str], list[list[int]]] = ([], [])
        """Rows of the step, and their draft tokens, `NONE` for each that lacks.

        All are empty if the device chose them and nothing on the host reads them.
        """
        self._outcomes: Any = None  # of the rows of the step that is sampled
        self._emitted: Any = None  # of the same: how many tokens, and which
        self._began_at = 0.0
        pinned = runner.device.type == "cuda"  # then the device copies from it by itself
        most = max_num_seqs * num_draft_tokens
        self._staged = torch.empty(most, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        self._preprocess, self._forward = runner._preprocess, runner._model_forward
        self._keep_books = runner._bookkeeping_sync
        self._describe = runner._calc_spec_decode_metadata
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens
        runner._preprocess, runner._bookkeeping_sync = self._prepare, self._bookkeeping
        runner._model_forward = self._model_forward
        runner._calc_spec_decode_metadata = self._describe_drafts
        runner.take_draft_token_ids = self._take_drafts

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._verified, self._drafts = None, ([], [])
        self._plan = scheduler_output
        if not scheduler_output.total_num_scheduled_tokens:  # then it is not prepared
            self._side.next_drafts(self._read(), ())
        launched = self._execute(scheduler_output, *args, **kwargs)
        self._mend(*self._drafts)  # from here on the device works
        self._side.begin(StepPlan.of(scheduler_output), self._began_at)
        self._side.launched()
        return launched

    def _describe_drafts(self, *args: Any, **kwargs: Any) -> Any:
        self._verified = verified = self._describe(*args, **kwargs)
        self._draft_indices = draft_places(verified)
        return verified

    def _prepare(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Place drafts in a step that is prepared but for them, and run what is left of that.

        Some models' inputs are embeddings of the drafts, so these are decided first.
        """
        runner, verified = self._runner, self._verified
        names = runner.input_batch.req_ids
        rooms = [0] * len(names) if verified is None else verified.num_draft_tokens
        self._rooms = dict(zip(names, rooms, strict=True))
        self._side.awaited()
        # A grammar that is not asked about the drafts would let any follow the first.
        self._unchecked = (
            any(rooms)
            and scheduler_output.has_structured_output_requests
            and not scheduler_output.pending_structured_output_tokens
        )
        self._let_device_choose()
        if self._embeds_drafts:
            self._decide()
        if runner.enable_prompt_embeds:
            self._mark_tokens(len(names))
        runner._draft_token_req_ids = None  # vLLM would read drafts that it has not made
        return self._preprocess(scheduler_output, *args, **kwargs)

    @property
    def _embeds_drafts(self) -> bool:
        return bool(self._runner.supports_mm_inputs or self._runner.enable_prompt_embeds)

    def _mark_tokens(self, num_rows: int) -> None:
        """Have the model embed each token of rows that are through their prompts.

        vLLM marks generated tokens by the text lengths that it assumed. It could take some for
        embeddings that a prompt brought.
        """
        runner, batch = self._runner, self._runner.input_batch
        firsts = runner.query_start_loc.np[: num_rows + 1]
        written = batch.num_computed_tokens_cpu[:num_rows] >= batch.num_prompt_tokens[:num_rows]
        count = int(firsts[-1])
        runner.is_token_ids.np[:count] |= np.repeat(written, np.diff(firsts))
        runner.is_token_ids.copy_to_gpu(count)

    def _let_device_choose(self) -> None:
        """Place what the device will choose, if it can."""
        if self._last is None or self._unchecked:
            self._choice.leave_to_host()
            return
        # Penalties, bad words and grammars look at drafts.
        output_token_ids = self._runner.input_batch.sampling_metadata.output_token_ids
        host_reads = bool(output_token_ids) or self._plan.has_structured_output_requests
        tokens = self._choice.launch(self._rooms, self._last, host_reads=host_reads)
        if tokens is not None:
            self._place(tokens, complete=False)

    def _decide(self) -> None:
        """Let the host choose if the device does not: read how the step before ended."""
        if self._choice.settle():
            return
        names = [name for name, n in self._rooms.items() if n and not self._unchecked]
        found = dict(zip(names, self._side.next_drafts(self._read(), names), strict=True))
        drafts = [(found.get(name, []) + [NONE] * n)[:n] for name, n in self._rooms.items()]
        self._drafts = list(self._rooms), drafts
        if any(self._rooms.values()):
            tokens = [*chain.from_iterable(drafts)]
            # The device may copy from host memory later, but before the result of this step, which
            # is read before the next such copy.
            self._staged.numpy()[: len(tokens)] = tokens
            self._place(self._staged[: len(tokens)], complete=NONE not in tokens)
        self._began_at = time.perf_counter()

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the model; then read how the step before ended, unless the host has chosen."""
        if not self._embeds_drafts:
            self._decide()
        output = self._forward(*args, **kwargs)
        choice = self._choice
        if choice.chooser is not Chooser.HOST:
            choice.add_branches()
            self._began_at = time.perf_counter()  # the device has begun
            if (last := self._read()) is not None:
                self._side.commit(last)
            self._drafts = list(self._rooms), choice.take()
        return output

    def _place(self, tokens: Tensor, *, complete: bool) -> None:
        """Write draft tokens of all rows to what is verified, and to the model's input.

        A row that lacks one (unless they are `complete`) goes on with what it chooses itself.
        """
        on_device = self._verified.draft_token_ids.copy_(tokens, non_blocking=True)
        inputs = on_device if complete else on_device.clamp(min=0)
        self._runner.input_ids.gpu.scatter_(0, self._draft_indices, inputs)

    def _read(self) -> StepOutput | None:
        """Wait for what the step before emitted, and take it down.

        What has ended emitted all that counts in earlier steps.
        """
        scheduler_output, last, self._last = self._plan, self._last, None
        requests, ended = self._runner.requests, scheduler_output.finished_req_ids
        replaced = scheduler_output.scheduled_cached_reqs.all_token_ids
        output = None
        if last is not None:
            rows = [row for row, name in enumerate(last.names) if name not in ended]
            names = [last.names[row] for row in rows]
            states, lengths, emitted = [requests[name] for name in names], [], []
            last.copied.synchronize()
            token_ids = last.token_ids.tolist()
            for row, name, state in zip(rows, names, states, strict=True):
                tokens = [] if row in last.within_prompt else token_ids[row]
                if NONE in tokens:
                    tokens = tokens[: tokens.index(NONE)]
                length = self._lengths[name]
                if tokens and name not in replaced:
                    state.output_token_ids[length - state.num_prompt_tokens :] = tokens
                emitted.append(tokens)
                lengths.append(length + len(tokens))
            self._lengths.update(zip(names, lengths, strict=True))
            texts = lambda row, length: _text(states[row])[:length]  # noqa: E731
            output = StepOutput(names, emitted, lengths, texts)
        for name in ended:
            self._lengths.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._lengths[new.req_id] = requests[new.req_id].num_tokens
        for name, tokens in replaced.items():
            self._lengths[name] = len(tokens)
        return output

    def _mend(self, names: list[str], drafts: list[list[int]]) -> None:
        """Set what vLLM reads of texts to choose tokens; it had placeholders."""
        runner, batch = self._runner, self._runner.input_batch
        batch.num_tokens_no_spec[: len(names)] = [self._lengths[name] for name in names]
        if batch.sampling_metadata.output_token_ids:  # for penalties, and bad words
            for row, draft in enumerate(drafts):
                batch.spec_token_ids[row][:] = [max(token, 0) for token in draft]
        states = [runner.requests[name] for name in names]
        if any(state.sampling_params.min_tokens for state in states if state.sampling_params):
            held_by_texts(batch.logitsprocs.all, states)

    def _bookkeeping(
        self, scheduler_output: Any, sampler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Tell the next step on the device how many tokens each row emitted, and the last one."""
        token_ids = sampler_output.sampled_token_ids  # [rows, 1 or 1 + K]
        counts = (token_ids >= 0).sum(dim=1, dtype=torch.int32)
        latest = token_ids.gather(1, (counts.long() - 1).clamp(min=0)[:, None])[:, 0]
        self._outcomes = as_outcomes(counts, latest)
        self._emitted = counts, token_ids
        self._runner._copy_valid_sampled_token_count(latest, counts)
        return self._keep_books(scheduler_output, sampler_output, *args, **kwargs)

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sample(*args, **kwargs)
        if (token_ids := getattr(output, "sampled_token_ids_cpu", None)) is not None:
            names = list(output._model_runner_output.req_ids)
            within_prompt = frozenset(output._invalid_req_indices)
            copied = output.async_copy_ready_event
            self._last = LaunchedStep(names, token_ids, copied, within_prompt, self._outcomes)
            emitting = [row for row in range(len(names)) if row not in within_prompt]
            self._side.sampled(names, emitting, self._verify_output)
            leave_undrafted(output._model_runner_output, self._side.undrafted(names))
        return output

    def _verify_output(self) -> Tensor:
        counts, token_ids = self._emitted
        return torch.cat(((counts - 1)[:, None], token_ids), dim=1)

    def _take_drafts(self) -> Any:
        """Return the drafts in the step, for the grammars to check; vLLM may change them."""
        names, padded = self._drafts
        drafts = [[token for token in draft if token != NONE] for draft in padded]
        return draft_token_ids(names, drafts) if names else None


def _text(state: Any) -> list[int]:
    return [*(state.prompt_token_ids or ()), *state.output_token_ids]
