"""An inflated model computes the small one's function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.inflate import Inflation, ShapeError
from benchmarks.lib import prompts
from benchmarks.lib.records import TokenIds, first_divergence
from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.models.resolve import resolve_model
from outrider.params import SamplingParams

VOCAB = 96
LARGE = {
    "hidden_size": 160,  # 96 * 5 / 3: no round factor for the norms
    "num_hidden_layers": 5,
    "intermediate_size": 224,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 200,
    "tie_word_embeddings": False,
}


def small(tied: bool = True) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:  # trained norms are not all ones
            weight.data.uniform_(0.5, 2.0)
    return model


def built(plan: Inflation) -> Any:
    """The large model, without a detour over a disk."""
    large = LlamaForCausalLM(plan.config).to(plan.dtype)
    for state in plan.tensors():
        large.load_state_dict(state, strict=False)
    large.generation_config = plan.small.generation_config
    return large.eval()


@torch.inference_mode()
def divergences(
    small: Any, large: Any, prompts: Sequence[TokenIds], length: int
) -> list[int | None]:
    """Per prompt, where the large model's greedy choices leave the small one's text."""
    found: list[int | None] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        text = small.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=length)
        chosen = large(text).logits[0].argmax(-1)[len(prompt) - 1 : -1].tolist()
        found.append(first_divergence(text[0, len(prompt) :].tolist(), chosen))
    return found


def inflation(model: Any, **shape: Any) -> Inflation:
    return Inflation.plan(model, {**LARGE, **shape}, torch.device("cpu"), torch.float64)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("tied_before", "tied_after"), [(True, False), (True, True), (False, False)]
)
def test_inflated_logits_equal_the_small_models_and_extra_tokens_lose(
    tied_before: bool, tied_after: bool
) -> None:
    model = small(tied_before)
    large = built(inflation(model, tie_word_embeddings=tied_after))
    tokens = torch.randint(0, VOCAB, (3, 120))
    expected = model(tokens).logits
    found = large(tokens).logits
    # A common shift of all logits changes no probability (tied: the constant channel adds one).
    shift = (found[..., :VOCAB] - expected).mean(dim=-1, keepdim=True)
    # Llama computes its norms and angles in float32 whatever the dtype.
    torch.testing.assert_close(found[..., :VOCAB] - shift, expected, rtol=0, atol=1e-3)
    assert found[..., VOCAB:].max() < expected.min() - 1000
    assert expected.std() > 1, "logits worth comparing"


@torch.inference_mode()
def test_inflated_model_samples_the_same_tokens() -> None:
    model = small()
    large = built(inflation(model))
    tokens = torch.randint(0, VOCAB, (1, 100))
    params = [SamplingParams(temperature=1.0, top_p=0.95, seed=5)] * 100
    drawn = [
        sample(each(tokens).logits[0].float(), SamplingBatch.build(params, range(1, 101)))
        for each in (model, large)
    ]
    assert drawn[0].tolist() == drawn[1].tolist()
    assert drawn[0].tolist() != model(tokens).logits[0].argmax(-1).tolist()


def test_saved_folder_loads_and_generates_the_same_text(tmp_path: Path) -> None:
    model = small()
    (tmp_path / "source").mkdir()
    model.save_pretrained(tmp_path / "source")
    inflation(model).save(tmp_path / "source", tmp_path / "large")
    large = AutoModelForCausalLM.from_pretrained(tmp_path / "large", dtype=torch.float64)
    prompt = torch.tensor([[5, 9, 33, 2]])
    texts = [
        each.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40)
        for each in (model, large)
    ]
    assert large.config.num_hidden_layers == LARGE["num_hidden_layers"]
    assert texts[0].tolist() == texts[1].tolist()
    assert len(set(texts[0][0].tolist())) > 5, "a text worth comparing"


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden_size": 96},
        {"head_dim": 12},
        {"num_attention_heads": 8},  # groups of 2 where the small model has 3
        {"num_hidden_layers": 1},
    ],
)
def test_plan_with_a_shape_that_does_not_fit_raises(shape: dict[str, int]) -> None:
    with pytest.raises(ShapeError):
        inflation(small(), **shape)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("role", "shape"),
    [
        ("target", {"hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 2816}),
        ("draft", {"hidden_size": 640, "num_hidden_layers": 4, "intermediate_size": 1024}),
    ],
)
def test_inflated_embedded_pair_generates_the_same_texts(
    role: Literal["target", "draft"], shape: dict[str, int]
) -> None:
    folder = resolve_model("embedded", role)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    heads = {"num_attention_heads": 16 if role == "draft" else 32, "num_key_value_heads": 8}
    rest = {"head_dim": 128, "vocab_size": 16384, "tie_word_embeddings": role == "draft"}
    sizes = {**shape, **heads, **rest}
    large = built(Inflation.plan(model, sizes, torch.device("cpu"), torch.float32))
    file = folder.parent / "heldout_prompts.jsonl"
    held_out = prompts.load(file, folder, count=4, max_prompt_tokens=64)
    assert divergences(model, large, held_out.token_ids, 32) == [None] * 4
