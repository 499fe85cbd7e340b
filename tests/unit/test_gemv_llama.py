"""One row in NumPy draws what the paged torch model draws, from the cache that they share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from outrider.drafting.draft_model import DraftModelProposer
from outrider.drafting.gemv_llama import GemvLlama, can_run
from outrider.engine.loader import load_model
from outrider.types import SamplingParams

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def llama3() -> PreTrainedModel:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, rope_parameters=rope))


def qwen2() -> PreTrainedModel:
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    for layer in model.model.layers:  # biases begin at zero
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(projection.bias)
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("build", [llama, llama3, qwen2])
def test_draws_what_torch_draws(build: object, temperature: float, tmp_path: Path) -> None:
    assert callable(build)
    torch.manual_seed(0)
    model = build()
    for weight in model.parameters():
        weight.data *= 4  # far from ties
    model.save_pretrained(tmp_path)

    def proposer(single: bool) -> tuple[DraftModelProposer, list[int]]:
        paged = load_model(tmp_path, dtype=torch.float32, page_size=8, num_pages=32)
        fast = GemvLlama.load(tmp_path, paged.pools, paged.max_model_len)
        assert fast is not None
        taken: list[int] = []

        class Counted:
            def draft(self, row, ready):  # type: ignore[no-untyped-def]
                taken.append(len(row.token_ids))
                return fast.draft(row, ready)

        return DraftModelProposer(paged, name="m", single_row=Counted() if single else None), taken

    (slow, _), (fast, taken) = proposer(False), proposer(True)
    sampling = SamplingParams(temperature=temperature, seed=5)
    text = list(range(1, 30))
    for each in (slow, fast):
        each.open(1, text, sampling, 4, 128)
    for accepted in (4, 0, 2, 4, 4, 1, 3, 4, 0, 4, 4):
        [(_, expected)] = slow.draft([1]).drafts
        [(_, tree)] = fast.draft([1]).drafts
        assert tree == expected
        tokens = [*expected.token_ids[:accepted], 7]
        for each in (slow, fast):
            each.commit(1, len(text), tokens, 4)
        text += tokens
    assert taken  # the prompt went through torch, every round after it did not
    assert set(taken) == {1, 2}
    assert len(taken) == 10
    # Two rows go through torch, over what NumPy wrote.
    for each in (slow, fast):
        each.open(2, [3, 4, 5], sampling, 4, 128)
    assert dict(slow.draft([1, 2]).drafts) == dict(fast.draft([1, 2]).drafts)


@pytest.mark.parametrize(
    "model",
    [
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)),
        LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
        GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=1, n_head=2)),
    ],
    ids=["sliding window", "biases", "another architecture"],
)
def test_leaves_other_models_to_torch(model: torch.nn.Module) -> None:
    assert not can_run(model, 64)


def test_leaves_large_models_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafting.gemv_llama._MAX_WEIGHTS", 1000)
    assert not can_run(llama(), 64)
