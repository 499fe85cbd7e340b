"""Coupled sampling inside vLLM: a seeded text is the same with any draft, or none.

vLLM takes no logits processor while it speculates, and runs none on draft positions. So its sampler
and its rejection sampler keep all of their work (penalties, masks, logprobs) except the choice of
tokens, which becomes argmax(logits / T + g(seed, position, token)); a draft token is accepted where
it equals that choice. Greedy rows choose as before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.sampling.noise import keys_of_seed
from outrider.engine.sampling.sample import Sample, SamplingBatch, sample
from outrider.params import VerificationRule
from outrider.vllm import adapter
from outrider.vllm.min_tokens import Held, let_bonus_end, set_held

_RAW: Final = ("raw_logprobs", "raw_logits")
"""Logprobs before the choice; others are of processed logits, which a choice would mark."""

_MAX_KEYS: Final = 8192  # of requests, most of which have ended
Rows = NDArray[np.int64]


def couple(runner: Any, default_seed: int) -> VerificationRule:
    """Replace how a model runner's samplers choose tokens; return the rule that is in effect.

    It stays vLLM's `rejection` where logprobs of processed logits are asked for, or where the
    version lacks what is replaced.
    """
    sampler: Any = getattr(runner, "sampler", None)
    rejection: Any = getattr(runner, "rejection_sampler", None)
    known = hasattr(sampler, "sample") and hasattr(rejection, "apply_logits_processors")
    if not known or getattr(sampler, "logprobs_mode", None) not in _RAW:
        return VerificationRule.REJECTION
    chooser = Chooser(runner, default_seed)
    choose_bonus, verify = sampler.sample, rejection.forward
    process = rejection.apply_logits_processors
    num_drafted: list[Rows | None] = [None]  # by row, while a step with drafts is sampled
    held: Held = []  # by `min_tokens`, while the tokens behind all drafts are chosen

    def sample(logits: Tensor, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if not chooser.samples(len(logits), metadata) and num_drafted[0] is None:
            return choose_bonus(logits, metadata, *args, **kwargs)
        return chooser.choose(logits, np.arange(len(logits)), num_drafted[0]), None

    def process_drafts(logits: Tensor, metadata: Any, spec_metadata: Any) -> Tensor:
        while held:
            set_held(*held.pop())
        logits = process(logits, metadata, spec_metadata)
        if (drafted := num_drafted[0]) is not None and len(logits):
            rows = np.repeat(np.arange(len(drafted)), drafted)
            starts = np.cumsum(drafted) - drafted
            chosen = chooser.choose(logits, rows, np.arange(len(rows)) - starts[rows])
            logits.scatter_(1, chosen[:, None], torch.inf)  # the largest is what is accepted
        return logits

    def forward(metadata: Any, draft_probs: Any, logits: Tensor, sampling: Any) -> Any:
        drafted = metadata.num_draft_tokens
        held[:] = let_bonus_end(sampling.logitsprocs.all, drafted)
        if not chooser.samples(len(drafted), sampling):
            return verify(metadata, draft_probs, logits, sampling)
        num_drafted[0] = np.asarray(drafted, dtype=np.int64)
        try:
            greedy = replace(sampling, all_greedy=True, all_random=False)
            return verify(metadata, None, logits, greedy)
        finally:
            num_drafted[0] = None

    sampler.sample = sample
    rejection.apply_logits_processors = process_drafts
    rejection.forward = forward
    return VerificationRule.COUPLED


class Chooser:
    """Chooses tokens for rows of vLLM's batch by their seeds and positions."""

    def __init__(self, runner: Any, default_seed: int) -> None:
        self._runner = runner  # which may replace its batch
        self._default_seed = default_seed
        self._keys: dict[str, Rows] = {}

    def samples(self, num_rows: int, metadata: Any) -> bool:
        """Tell whether a row of vLLM's batch is sampled; its warm-up has another batch."""
        return not metadata.all_greedy and num_rows == len(self._runner.input_batch.req_ids) > 0

    def choose(self, logits: Tensor, rows: Rows, offsets: Rows | None) -> Tensor:
        """Choose a token for each of `logits` [n, vocab]: int64 [n].

        `rows` are the batch's row of each; `offsets` count the draft tokens before it.
        """
        batch, device = self._runner.input_batch, logits.device
        # Nothing draws from vLLM's own. Behind a part of a prompt it would take back that draw,
        # which no generator on a CPU can.
        batch.generators.clear()
        temperature = batch.temperature_cpu[rows]
        top_k, top_p = batch.top_k_cpu[rows], batch.top_p_cpu[rows]
        positions = batch.num_tokens_no_spec[rows].astype(np.int64)
        if offsets is not None:
            positions += offsets
        keys = np.stack([self._key(name) for name in batch.req_ids])[rows]

        def column(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(device=device, dtype=dtype, non_blocking=True)

        greedy = temperature == 0.0
        sampling = SamplingBatch(
            temperature=column(temperature, torch.float32),
            top_k=column(top_k, torch.int64),
            top_p=column(top_p, torch.float32),
            min_p=torch.zeros(len(rows), device=device),
            seed=column(keys, torch.int64),
            position=column(positions, torch.int64),
            all_greedy=bool(greedy.all()),
            any_greedy=bool(greedy.any()),
            any_sorted=bool((top_k < logits.shape[-1]).any() or (top_p < 1.0).any()),
            any_min_p=False,  # vLLM refuses it with drafts
        )
        return _sample(device.type)(logits, sampling)

    def _key(self, name: str) -> Rows:
        key = self._keys.get(name)
        if key is None:
            if len(self._keys) >= _MAX_KEYS:
                self._keys.clear()
            params = self._runner.requests[name].sampling_params
            seed = adapter.seed_of(name, params.seed, self._default_seed)
            self._keys[name] = key = np.array(keys_of_seed(seed))
        return key


def _sample(device_type: str) -> Sample:
    if device_type == "cuda":
        from outrider.engine.cuda.sampling import sample as fused

        return fused
    return sample
