"""A model runner that schedules ahead as vLLM's does, around `StepsAhead`: no model, no vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.vllm.adapter import StepOutput, StepPlan, undrafted_in
from outrider.vllm.ahead.branch_table import BranchTable
from outrider.vllm.ahead.draft_side import DraftSide, Known
from outrider.vllm.ahead.placed_drafts import PlacedDrafts
from outrider.vllm.ahead.steps import StepsAhead
from tests.support.services.vllm_steps import K, new_request, truth


class AheadRunner:
    """Runs steps whose plans are made before the last step's tokens are read."""

    device = torch.device("cpu")
    supports_mm_inputs = enable_prompt_embeds = False

    def __init__(self, side: DraftSide | None = None) -> None:
        """Make a runner of no requests; without a `side`, it drafts itself what is right."""
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_tokens_no_spec=np.zeros(8, np.int32),
            num_computed_tokens_cpu=np.zeros(8, np.int32),
            num_prompt_tokens=np.zeros(8, np.int32),
            sampling_metadata=SimpleNamespace(output_token_ids=[]),
            spec_token_ids=[[] for _ in range(8)],
            logitsprocs=SimpleNamespace(all=()),
        )
        self.input_ids = SimpleNamespace(gpu=torch.full((64,), -1, dtype=torch.int32))
        self.query_start_loc = SimpleNamespace(np=np.zeros(9, np.int32))
        self.is_token_ids = SimpleNamespace(np=np.zeros(64, bool), copy_to_gpu=self._copy_mask)
        self.told: list[StepOutput | None] = []
        self.counts: list[list[int]] = []  # emitted tokens that the device is told of
        self.verified: list[list[int]] = []  # draft tokens of each row, -1 for none
        self.right = K  # draft tokens that are
        self.room = K  # for draft tokens of a row, at most
        self.without = ""  # rows without drafts, if it drafts itself
        self.outputs: list[Any] = []
        self.within_prompt = ""  # rows that emit nothing
        self.calls: list[str] = []
        self.late = 0  # looks at a step's result until it is known
        self.lengths: dict[str, int] = {}  # of the drafts that the device chose
        self.made: Callable[[Mapping[str, int]], PlacedDrafts | None] = lambda _: None
        """Returns what the device has made behind the last step."""
        self.prompts_of: list[str] = []  # rows whose prompts may have ended in the last step
        self.choices: list[int] = []  # what ranks agreed on: who chooses, and whether branches came
        self.shared: list[Tensor] = []  # tokens for other ranks
        self.host_drafts: list[list[list[int]]] = []  # of each step for which the host chose
        StepsAhead(self, side or self, 8, K)

    def run(
        self,
        *names: str,
        new: Sequence[str] = (),
        finished: Sequence[str] = (),
        replaced: dict[str, list[int]] | None = None,
        **grammar: bool,
    ) -> list[list[int]]:
        """Run a step; requests that are not new have room for draft tokens. Returns its tokens.

        These are only what the device has: the next step is what reads them.
        """
        undrafted = (*new, *(replaced or {}))
        # The last step's output is not known when vLLM schedules.
        undrafted += tuple(undrafted_in(self.outputs[-2]) if len(self.outputs) > 1 else ())
        spec = {name: [-1] * self.room for name in names if name not in undrafted}
        plan = SimpleNamespace(
            scheduled_new_reqs=[new_request(name) for name in new],
            finished_req_ids=set(finished),
            scheduled_spec_decode_tokens=spec,
            num_scheduled_tokens={name: 1 + len(spec.get(name, ())) for name in names},
            total_num_scheduled_tokens=len(names),
            scheduled_cached_reqs=SimpleNamespace(all_token_ids=replaced or {}),
            has_structured_output_requests=grammar.get("has", False),
            pending_structured_output_tokens=grammar.get("asks", False),
        )
        self.execute_model(plan)
        if not names:
            return []
        output = self.sample_tokens(None)
        self.outputs.append(output._model_runner_output)
        return [*output.sampled_token_ids_cpu.tolist()]

    def execute_model(self, plan: Any) -> None:
        for name in plan.finished_req_ids:
            del self.requests[name]
        for new in plan.scheduled_new_reqs:
            self.requests[new.req_id] = State(new.prompt_token_ids)
        for name, tokens in plan.scheduled_cached_reqs.all_token_ids.items():
            self.requests[name].output_token_ids = tokens[3:]
        self._plan, names = plan, list(plan.num_scheduled_tokens)
        self.input_batch.req_ids = names
        if names:
            ends = np.cumsum(list(plan.num_scheduled_tokens.values()))
            drafted = [len(plan.scheduled_spec_decode_tokens.get(name, ())) for name in names]
            if any(drafted):
                self._calc_spec_decode_metadata(np.array(drafted), ends)
            else:  # for `sample_tokens` here; vLLM has none
                AheadRunner._calc_spec_decode_metadata(self, np.array(drafted), ends)
            self._fill_mask(plan, ends)
            self._preprocess(plan, int(ends[-1]))
            self._model_forward()

    def _fill_mask(self, plan: Any, ends: Any) -> None:
        """Say what is a token: what is behind a prompt is marked elsewhere, at worst."""
        new, batch = {each.req_id for each in plan.scheduled_new_reqs}, self.input_batch
        self.query_start_loc.np[1 : 1 + len(ends)] = ends
        for row, (name, end) in enumerate(zip(batch.req_ids, ends, strict=True)):
            batch.num_prompt_tokens[row] = self.requests[name].num_prompt_tokens
            batch.num_computed_tokens_cpu[row] = batch.num_prompt_tokens[row] - (name in new)
            self.is_token_ids.np[self.query_start_loc.np[row] : end] = name in new
        self.mask = self.is_token_ids.np.copy()

    def _copy_mask(self, count: int) -> None:
        self.mask[:count] = self.is_token_ids.np[:count]

    def _model_forward(self) -> None:
        self.calls.append("runs")
        self.launched_at = time.perf_counter()
        if not self.enable_prompt_embeds:
            self._take_inputs()

    def _take_inputs(self) -> None:
        ids = self.input_ids.gpu[: self._num_tokens].numpy()
        read = self.mask[: self._num_tokens] if self.enable_prompt_embeds else True
        self._inputs = np.where(read, ids, -9).tolist()
        self.input_ids.gpu.fill_(-1)  # as the next step's placeholders do

    def _calc_spec_decode_metadata(self, drafted: Any, ends: Any) -> Any:
        """Describe draft tokens; all but a row's last token with logits verify the next one."""
        self._drafted = drafted
        rows = [np.arange(end - n - 1, end) for n, end in zip(drafted, ends, strict=True)]
        verifying = np.concatenate([np.arange(len(row)) < len(row) - 1 for row in rows])
        self._metadata = SimpleNamespace(
            num_draft_tokens=drafted.tolist(),
            draft_token_ids=torch.full((int(drafted.sum()),), -1, dtype=torch.int32),
            logits_indices=torch.tensor(np.concatenate(rows), dtype=torch.int32),
            target_logits_indices=torch.tensor(np.flatnonzero(verifying), dtype=torch.int32),
        )
        return self._metadata

    def _preprocess(self, _plan: Any, num_tokens: int) -> None:
        self.calls.append("prepared")
        self._num_tokens = num_tokens
        if self.enable_prompt_embeds:
            self._take_inputs()

    def sample_tokens(self, _grammar: None) -> Any:
        names, rows = self.input_batch.req_ids, []
        self.verified = [
            part.tolist() for part in self._metadata.draft_token_ids.split(self._drafted.tolist())
        ]
        for row, (name, draft) in enumerate(zip(names, self.verified, strict=True)):
            length, tokens = int(self.input_batch.num_tokens_no_spec[row]), []
            for token in [*draft, -1]:
                tokens.append(truth(name, length + len(tokens)))
                if tokens[-1] != token:
                    break
            rows.append(tokens + [-1] * (1 + K - len(tokens)))
        sampled = torch.tensor(rows, dtype=torch.int32)
        self._bookkeeping_sync(self._plan, SimpleNamespace(sampled_token_ids=sampled))
        looks = iter([False] * self.late)
        copied = SimpleNamespace(
            synchronize=lambda: self.calls.append("read"), query=lambda: next(looks, True)
        )
        return SimpleNamespace(
            sampled_token_ids_cpu=sampled,
            async_copy_ready_event=copied,
            _invalid_req_indices=[i for i, name in enumerate(names) if name in self.within_prompt],
            _model_runner_output=SimpleNamespace(req_ids=names),
        )

    def _copy_valid_sampled_token_count(self, latest: Any, counts: Any) -> None:
        self.latest = latest.tolist()
        self.counts.append(counts.tolist())

    def _bookkeeping_sync(self, _plan: Any, _output: Any) -> None:
        for name in self.input_batch.req_ids:
            self.requests[name].output_token_ids += [-1] * (1 + K)  # for what is not read yet

    def begin(self, plan: StepPlan, began: float | None = None) -> None:
        self.calls.append(f"begin {len(plan.scheduled)}")
        self.began = began

    def awaited(self) -> None:
        self.calls.append("awaited")

    def sampled(self, names: Sequence[str], emitting: Any, tokens: Callable[[], Any]) -> None:
        self.emitting = [names[place] for place in emitting]
        self.emitted = tokens().tolist()

    def undrafted(self, names: Sequence[str]) -> frozenset[str]:
        return frozenset(names) & frozenset(self.without)

    def drafts_behind(self, rooms: Mapping[str, int]) -> PlacedDrafts | None:
        return self.made(rooms)

    def begin_prompts(self, names: Iterable[str]) -> None:
        self.prompts_of = [*names]

    def agreed(self, choice: int) -> int:
        self.choices.append(choice)
        return choice

    def share(self, tokens: Tensor) -> None:
        self.shared.append(tokens.clone())

    def launched(self) -> None:
        self.calls.append("launched")

    def next_drafts(self, output: StepOutput | None, names: Sequence[str]) -> list[list[int]]:
        self.told.append(output)
        known = {} if output is None else dict(zip(output.names, output.lengths, strict=True))
        drafts = [self.draft(name, known[name]) if name in known else [] for name in names]
        self.host_drafts.append(drafts)
        return drafts

    def draft(self, name: str, length: int) -> list[int]:
        return [truth(name, length + i) + (i >= self.right) for i in range(K)]

    def write_branches(self, places: Mapping[str, int], table: BranchTable) -> bool:
        """Write what follows each outcome that a row's present draft allows, and wrong ones."""
        for name, row in places.items():
            state = self.requests[name]
            length = len([token for token in state.text if token >= 0])
            for emitted in range(1, K + 2):
                end = length + emitted
                table.write(row, emitted, truth(name, end - 1), self.draft(name, end))
                table.write(row, emitted, truth(name, end - 1) + 1, [1] * K)
        return True

    def await_branches(self, _table: BranchTable, _known: Known) -> bool:
        return True

    def add_branches(self, _table: BranchTable, known: Known) -> None:
        self.calls.append("added")
        while not known():
            pass

    def commit(self, output: StepOutput) -> None:
        self.calls.append("committed")
        self.told.append(output)

    def chosen(self, lengths: dict[str, int]) -> None:
        self.lengths = lengths

    def take_draft_token_ids(self) -> Any:
        raise AssertionError("vLLM's has no drafts of ours")


class OtherRank(AheadRunner):
    """Another tensor-parallel rank, which runs each step once rank 0 has. It drafts nothing."""

    def __init__(self, first: AheadRunner) -> None:
        super().__init__()
        self.late = first.late
        self._of_first, self._tokens = iter(first.choices), iter(first.shared)
        self._drafts = iter(first.host_drafts)

    def agreed(self, choice: int) -> int:  # noqa: ARG002
        return next(self._of_first)

    def share(self, tokens: Tensor) -> None:
        tokens.copy_(next(self._tokens))

    def next_drafts(self, output: StepOutput | None, names: Sequence[str]) -> list[list[int]]:
        super().next_drafts(output, names)
        return next(self._drafts)

    def write_branches(self, places: Mapping[str, int], table: BranchTable) -> bool:  # noqa: ARG002
        return False

    def await_branches(self, _table: BranchTable, _known: Known) -> bool:
        return False

    def add_branches(self, _table: BranchTable, _known: Known) -> None: ...


class State:
    """A request as vLLM's runner keeps it."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt_token_ids = prompt
        self.num_prompt_tokens = len(prompt)
        self.output_token_ids: list[int] = []
        self.sampling_params = SimpleNamespace(min_tokens=0)

    @property
    def text(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)
