"""Step to StepResult: pack, forward, sample, verify; one small copy from the device."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from outrider.engine.batch import Model, pack
from outrider.engine.sampling import SamplingBatch, sample
from outrider.engine.scheduler import ScheduledRow, Step, StepResult
from outrider.engine.verifier import verify_rows
from outrider.types import SamplingParams, TokenIds


class Runner:
    """Owns the model's side of a step. Knows nothing of requests but their sampling."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """Runs one forward. Whatever the model raises passes through."""
        began = time.perf_counter()
        batch = pack([row.slice for row in step.rows], self.model.page_size, self.model.device)
        logits = self.model.forward(batch)
        forward_s = time.perf_counter() - began
        if not len(logits):
            return StepResult(((),) * len(step.rows), (0,) * len(step.rows), forward_s)
        ends = [row for row in step.rows if row.slice.num_logits]
        verified = iter(self._verify(ends, self._draw(logits, ends)))
        choices: list[TokenIds] = []
        accepted: list[int] = []
        for row in step.rows:
            count, *chosen = next(verified) if row.slice.num_logits else (0,)
            choices.append(tuple(chosen[: row.slice.num_logits]))
            accepted.append(count)
        return StepResult(tuple(choices), tuple(accepted), forward_s)

    def _draw(self, logits: Tensor, rows: list[ScheduledRow]) -> Tensor:
        """What the target chooses from each row of logits: int64 [num_logits]."""
        if all(row.seq.request.sampling.greedy for row in rows):
            return logits.argmax(dim=-1)
        return sample(logits, self._sampling(rows))

    def _verify(self, rows: list[ScheduledRow], drawn: Tensor) -> list[list[int]]:
        """Per row: drafts accepted, then its choices, padded. The step's one copy to the host."""
        counts = [row.slice.num_logits for row in rows]
        width = max(counts)
        if width == 1:
            return [[0, token] for token in drawn.tolist()]
        padding = (-1,) * (width - 1)
        drafts = torch.tensor([(row.draft + padding)[: width - 1] for row in rows])
        if min(counts) < width:
            starts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
            at = (starts[:, None] + torch.arange(width)).clamp(max=len(drawn) - 1)
            drawn = drawn[at.to(drawn.device, non_blocking=True)]
        choices = drawn.view(len(rows), width)
        accepted = verify_rows(drafts.to(drawn.device, non_blocking=True), choices)
        return torch.cat((accepted[:, None], choices), dim=1).tolist()

    def _sampling(self, rows: list[ScheduledRow]) -> SamplingBatch:
        """The token after each of a row's last `num_logits` tokens is drawn."""
        params: list[SamplingParams] = []
        positions: list[int] = []
        for row in rows:
            count = row.slice.num_logits
            end = row.slice.start + len(row.slice.token_ids) + 1
            params += [row.seq.request.sampling] * count
            positions += range(end - count, end)
        return SamplingBatch.build(params, positions, self.model.device)
