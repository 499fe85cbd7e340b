"""The scores of rounded models."""

import math

import torch

from benchmarks.quantization import agreement, continued, scores
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.model.quantization import round_linears
from tests.support.models.architectures import ARCHITECTURES, random_model


def test_scores_are_those_of_plain_forwards_and_tell_rounding() -> None:
    starts = [[i * k % 97 for i in range(1, 12 + k)] for k in (3, 5, 8)]
    options = ModelOptions(page_size=16, num_pages=32)
    plain = build_paged_model(random_model(ARCHITECTURES["llama"], torch.float32), options)
    texts = continued(plain, starts, 6)
    found = scores(plain, texts, starts)
    reference = random_model(ARCHITECTURES["llama"], torch.float32)
    losses = []
    for text, start, choices in zip(texts, starts, found.choices, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([text])).logits[0]
        greedy = logits.argmax(-1).tolist()
        assert text[: len(start)] == start
        assert text[len(start) :] == greedy[len(start) - 1 : -1] == choices
        losses += (-logits.log_softmax(-1)[range(len(start) - 1), start[1:]]).tolist()
    assert math.isclose(found.nats, sum(losses) / len(losses), rel_tol=1e-5)
    rounded = random_model(ARCHITECTURES["llama"], torch.float32)
    round_linears(rounded, "fp8")
    other = scores(build_paged_model(rounded, options), texts, starts)
    assert agreement(found, found) == 1.0
    assert 0.0 < agreement(found, other) <= 1.0
    assert other.nats != found.nats
