"""Coupled choices inside vLLM's samplers, which are played here, and their wrapping."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.params import SamplingParams, VerificationRule
from outrider.vllm.coupled import couple

VOCAB = 97


@dataclass(frozen=True)
class Metadata:
    """The part of vLLM's `SamplingMetadata` that is read."""

    all_greedy: bool
    all_random: bool = False
    logitsprocs: Any = field(default_factory=lambda: SimpleNamespace(all=()))


class Sampler:
    """Stands for vLLM's: unlike ours, it chooses token 0."""

    logprobs_mode = "raw_logprobs"

    def sample(self, logits: Tensor, _metadata: Any) -> tuple[Tensor, None]:
        return torch.zeros(len(logits), dtype=torch.int64), None


class RejectionSampler:
    """Stands for vLLM's: accepts drafts that are the largest logit, as it does for greedy rows."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def apply_logits_processors(self, logits: Tensor, _metadata: Any, _spec: Any) -> Tensor:
        return logits + 0.0

    def forward(self, spec: Any, _probs: Any, logits: Tensor, metadata: Metadata) -> Any:
        ends = np.cumsum([k + 1 for k in spec.num_draft_tokens]) - 1
        drafts = np.setdiff1d(np.arange(len(logits)), ends)
        bonus, _ = self.sampler.sample(logits[ends], metadata)
        chosen = self.apply_logits_processors(logits[drafts], metadata, spec).argmax(-1)
        return metadata.all_greedy, chosen.tolist(), bonus.tolist()


ROWS = [
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.0, seed=6),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.8, seed=7),
]
LENGTHS = [11, 20, 3]


def make_runner(mode: str = "raw_logprobs") -> Any:
    names = ["a", "b", "c"]
    batch = SimpleNamespace(
        req_ids=names,
        generators={0: torch.Generator()},
        temperature_cpu=np.array([row.temperature for row in ROWS], dtype=np.float32),
        top_k_cpu=np.array([row.top_k or VOCAB for row in ROWS], dtype=np.int32),
        top_p_cpu=np.array([row.top_p for row in ROWS], dtype=np.float32),
        num_tokens_no_spec=np.array(LENGTHS, dtype=np.int32),
    )
    requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(seed=row.seed))
        for name, row in zip(names, ROWS, strict=True)
    }
    sampler = Sampler()
    sampler.logprobs_mode = mode
    rejection = RejectionSampler(sampler)
    return SimpleNamespace(
        input_batch=batch, requests=requests, sampler=sampler, rejection_sampler=rejection
    )


def expected(logits: Tensor, rows: list[int], positions: list[int]) -> list[int]:
    """What the native engine chooses."""
    return sample(logits, SamplingBatch.build([ROWS[i] for i in rows], positions)).tolist()


def test_couple_without_drafts_chooses_as_the_native_engine() -> None:
    runner = make_runner()
    assert couple(runner, 0) is VerificationRule.COUPLED
    logits = torch.randn(3, VOCAB, generator=torch.manual_seed(1))
    chosen, _ = runner.sampler.sample(logits, Metadata(all_greedy=False))
    assert chosen.tolist() == expected(logits, [0, 1, 2], LENGTHS)
    assert chosen[1] == logits[1].argmax()
    assert not runner.input_batch.generators, "vLLM has no draw to take back"


def test_couple_with_drafts_chooses_each_token_by_its_position() -> None:
    runner = make_runner()
    couple(runner, 0)
    spec = SimpleNamespace(num_draft_tokens=[2, 0, 3])
    logits = torch.randn(8, VOCAB, generator=torch.manual_seed(2))
    greedy, chosen, bonus = runner.rejection_sampler.forward(
        spec, None, logits, Metadata(all_greedy=False)
    )
    assert greedy, "a draft is accepted where it is the choice"
    drafts, ends = [0, 1, 4, 5, 6], [2, 3, 7]
    assert chosen == expected(logits[drafts], [0, 0, 2, 2, 2], [11, 12, 3, 4, 5])
    assert bonus == expected(logits[ends], [0, 1, 2], [13, 20, 6])


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_couple_with_logprobs_of_processed_logits_leaves_vllms_rule(mode: str) -> None:
    runner = make_runner(mode)
    assert couple(runner, 0) is VerificationRule.REJECTION
    chosen, _ = runner.sampler.sample(torch.zeros(3, VOCAB), Metadata(all_greedy=False))
    assert chosen.tolist() == [0, 0, 0]


def test_couple_with_unknown_samplers_leaves_them() -> None:
    assert couple(SimpleNamespace(), 0) is VerificationRule.REJECTION


def test_couple_leaves_greedy_and_warm_up_batches_to_vllm() -> None:
    runner = make_runner()
    couple(runner, 0)
    logits = torch.randn(3, VOCAB)
    assert runner.sampler.sample(logits, Metadata(all_greedy=True))[0].tolist() == [0, 0, 0]
    warm_up = torch.randn(5, VOCAB)
    assert runner.sampler.sample(warm_up, Metadata(all_greedy=False))[0].tolist() == [0] * 5
