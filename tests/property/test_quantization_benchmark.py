"""The scores of rounded models are those of plain forwards."""

import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.quantization import agreement, continued, scores
from outrider import LLM
from tests.support.checkpoints.tiny_pair import save_pair


def test_scores_are_those_of_plain_forwards_and_tell_rounding(tmp_path: Path) -> None:
    starts = [[i * k % 97 for i in range(1, 12 + k)] for k in (3, 5, 8)]
    folder, _ = save_pair(tmp_path, eps=0.15)
    with LLM(str(folder), dtype="float32", device="cpu", quantization="none") as plain:
        texts = continued(plain, starts, 6)
        found = scores(plain, texts, starts)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses: list[float] = []
    for text, start, choices in zip(texts, starts, found.choices, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([text])).logits[0]
        greedy = logits.argmax(-1).tolist()
        assert text[: len(start)] == start
        assert text[len(start) :] == greedy[len(start) - 1 : -1] == choices
        losses += (-logits.log_softmax(-1)[range(len(start) - 1), start[1:]]).tolist()
    assert math.isclose(found.nats, sum(losses) / len(losses), rel_tol=1e-5)
    with LLM(str(folder), dtype="float32", device="cpu", quantization="fp8") as rounded:
        other = scores(rounded, texts, starts)
    with LLM(str(folder), dtype="float32", device="cpu", kv_cache_dtype="fp8") as small:
        cached = scores(small, texts, starts)
    assert agreement(found, found) == 1.0
    assert 0.0 < agreement(found, cached) <= 1.0
    assert cached.nats != found.nats
    assert 0.0 < agreement(found, other) <= 1.0
    assert other.nats != found.nats
