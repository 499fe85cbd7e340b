"""Step to StepResult: pack, forward, sample, verify; one small copy from the device."""

from __future__ import annotations

import time

import torch

from outrider.engine.batch import Model, pack
from outrider.engine.sampling import SamplingBatch, sample
from outrider.engine.scheduler import ScheduledRow, Step, StepResult
from outrider.engine.verifier import verify
from outrider.types import SamplingParams


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
        if all(row.seq.request.sampling.greedy for row in step.rows):
            drawn = logits.argmax(dim=-1).tolist()
        else:
            drawn = sample(logits, self._sampling(step.rows)).tolist()
        choices, accepted, at = [], [], 0
        for row in step.rows:
            chosen = tuple(drawn[at : at + row.slice.num_logits])
            at += row.slice.num_logits
            choices.append(chosen)
            accepted.append(verify(row.draft, chosen) if chosen else 0)
        return StepResult(tuple(choices), tuple(accepted), forward_s)

    def _sampling(self, rows: tuple[ScheduledRow, ...]) -> SamplingBatch:
        """The token after each of a row's last `num_logits` tokens is drawn."""
        params: list[SamplingParams] = []
        positions: list[int] = []
        for row in rows:
            count = row.slice.num_logits
            end = row.slice.start + len(row.slice.token_ids) + 1
            params += [row.seq.request.sampling] * count
            positions += range(end - count, end)
        return SamplingBatch.build(params, positions, self.model.device)
