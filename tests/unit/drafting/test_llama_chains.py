"""The compiled loops draw what the paged torch model draws, from the cache that they share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
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
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.draft_tree import DraftTree
from outrider.drafting.building.config import DraftModelConfig
from outrider.drafting.building.methods import build_proposer
from outrider.drafting.cpu import llama_kernels
from outrider.drafting.cpu.llama_chains import LlamaChains
from outrider.drafting.cpu.llama_kernels import Draws, compiled, draw
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.drafters import Chain, DraftInput
from outrider.drafting.graphs.chains import draft_chains
from outrider.drafting.proposer import SessionStart
from outrider.engine.batch import RowSlice
from outrider.engine.layers.linear import PackedLinear
from outrider.engine.model.llama import FusedLlama
from outrider.engine.model.loader import ModelOptions, build_paged_model, load_model
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.sampling.noise import seed_keys
from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=2**64 - 1, top_k=5),
    SamplingParams(temperature=1.3, seed=3, top_p=0.8),
    SamplingParams(temperature=2.0, seed=8, min_p=0.2),
    SamplingParams(temperature=1.5, seed=2**40, top_k=30, top_p=0.6, min_p=0.01),
]
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 50,
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


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    for weight in model.parameters():
        weight.data *= 4  # far from ties
    model.to(dtype).save_pretrained(folder)


def built(model: torch.nn.Module) -> PagedModel:
    options = ModelOptions(page_size=8, num_pages=8, max_model_len=64, self_test=False)
    return build_paged_model(model, options)


def load(folder: Path) -> tuple[PagedModel, LlamaChains]:
    paged = load_model(folder, ModelOptions(page_size=8, num_pages=64), dtype=torch.float32)
    chains = LlamaChains.of(paged)
    assert chains is not None
    return paged, chains


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("build", [llama, llama3, qwen2])
def test_llama_chains_over_scattered_pages_equal_the_model(
    build: Callable[[], PreTrainedModel], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rows of other lengths, catch-ups, drafts wanted and sampling; from either's own cache."""
    torch.manual_seed(0)
    save(build(), tmp_path, dtype)
    paged, chains = load(tmp_path)
    rng = np.random.default_rng(1)
    for num_rows in (1, 2, 3, 6):
        pages = rng.permutation(64)
        wanted = sorted((int(n) for n in rng.integers(1, 7, num_rows)), reverse=True)
        rows: list[DraftInput] = []
        for row in range(num_rows):
            start, fed = int(rng.integers(1, 60)), int(rng.integers(1, 4))
            text = rng.integers(0, 101, start + fed).tolist()
            table = pages[row * 10 : (row + 1) * 10].tolist()
            prefix = RowSlice(text[:start], 0, table, 1)
            draft_chains(paged, [DraftInput(prefix, 0, SAMPLINGS[row])])
            rest = RowSlice(text[start:], start, table, 1)
            rows.append(DraftInput(rest, wanted[row], SAMPLINGS[row]))
        expected = [chain for chain, _ in draft_chains(paged, rows)]
        assert [chain for chain, _ in chains.draft(rows)] == expected


def assert_alike(ours: dict[int, DraftTree], theirs: dict[int, DraftTree]) -> None:
    """The same drafts, and confidences that differ by rounding at most."""
    assert {key: tree._replace(confidences=b"") for key, tree in ours.items()} == {
        key: tree._replace(confidences=b"") for key, tree in theirs.items()
    }
    for key, tree in ours.items():
        assert len(tree.confidences) == len(tree.token_ids)
        np.testing.assert_allclose([*tree.confidences], [*theirs[key].confidences], atol=1)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLINGS[1]], ids=["greedy", "sampled"])
def test_llama_chains_in_a_proposer_keep_its_drafts(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    save(llama(), tmp_path, torch.bfloat16)
    taken: list[list[int]] = []

    class Counted:
        def __init__(self, chains: LlamaChains) -> None:
            self.max_tokens = chains.max_tokens
            self._chains = chains

        def draft(self, rows: Sequence[DraftInput]) -> list[Chain]:
            taken.append([len(row.slice.token_ids) for row in rows])
            return self._chains.draft(rows)

        def feed(self, slices: Sequence[RowSlice]) -> bool:
            return self._chains.feed(slices)

    slow = DraftModelProposer(load(tmp_path)[0], name="m")
    paged, chains = load(tmp_path)
    fast = DraftModelProposer(paged, name="m", chain_drafter=Counted(chains))
    texts = {1: list(range(1, 40)), 2: list(range(50, 80))}
    for each in (slow, fast):
        for key, text in texts.items():
            each.open(key, SessionStart(text, sampling, 4, 128))
    for accepted in (4, 0, 2, 4, 4, 1, 3):
        expected = dict(slow.draft([1, 2]).drafts)
        assert_alike(dict(fast.draft([1, 2]).drafts), expected)
        for key, text in texts.items():
            tokens = [*expected[key].token_ids[:accepted], 7]
            for each in (slow, fast):
                each.commit(key, len(text), tokens, 4)
            text += tokens
    # The prompts went through torch, every round after it did not: after a fully accepted draft
    # its last token is fed too.
    assert taken == [[2, 2], [1, 1], [1, 1], [2, 2], [2, 2], [1, 1]]
    for each in (slow, fast):
        each.open(3, SessionStart(list(range(20)), sampling, 4, 128))
    # A prompt lets the others go first; it is torch's, over what the loops wrote.
    for asked, drafted in (([1, 2, 3], {1, 2}), ([3], {3})):
        expected = dict(slow.draft(asked).drafts)
        assert set(expected) == drafted
        assert_alike(dict(fast.draft(asked).drafts), expected)
    assert len(taken) == 7


def test_llama_kernels_with_any_cuts_sample_the_tokens_of_torch() -> None:
    rng = np.random.default_rng(0)
    keeps = itertools.product((0, 1, 3, 40, 5000), (1.0, 0.95, 0.5, 0.01), (0.0, 0.001, 0.3, 1.0))
    for i, (top_k, top_p, min_p) in enumerate(keeps):
        for spread in (0.1, 3.0, 20.0):
            logits = rng.standard_normal(2003).astype(np.float32) * np.float32(spread)
            if i % 2:
                logits = np.round(logits)  # ties, also at the cuts
            params = SamplingParams(
                temperature=float(rng.uniform(0.2, 2)),
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=int(rng.integers(2**63)),
            )
            position = int(rng.integers(100_000))
            expected = sample(
                torch.from_numpy(logits)[None], SamplingBatch.build([params], [position])
            )
            draws = Draws(
                np.asarray([params.temperature], np.float32),
                np.asarray([top_k]),
                np.asarray([top_p], np.float32),
                np.asarray([min_p], np.float32),
                seed_keys([params.seed]).numpy().astype(np.uint32),
            )
            token, gap = draw(logits, draws, 0, position)
            assert token == int(expected)
            assert gap >= 0.0


def test_build_proposer_on_cpu_compiles_all_kernels() -> None:
    proposer, _ = build_proposer((DraftModelConfig(kv_cache_memory=16),), 256, print)
    kernels = (llama_kernels.draft, llama_kernels.draw)
    before = [list(kernel.signatures) for kernel in kernels]
    assert before[0]
    for key, sampling in enumerate(SAMPLINGS):
        proposer.open(key, SessionStart([5, 6, 7], sampling, key + 1, 100))
    for sessions in ([0], [1], range(len(SAMPLINGS))):
        for _ in range(2):
            for key, tree in proposer.draft(sessions).drafts:
                proposer.commit(key, tree.base_len, tree.token_ids, 4)
    assert [list(kernel.signatures) for kernel in kernels] == before


def test_kernels_are_compiled_once_for_any_number_of_layers(tmp_path: Path) -> None:
    signatures = []
    for num_layers in (2, 3):
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": num_layers}))
        save(model, tmp_path / str(num_layers), torch.float32)
        paged, chains = load(tmp_path / str(num_layers))
        rows = [DraftInput(RowSlice([5, 6, 7], 0, [0], 1), 4, GREEDY)]
        expected = [chain for chain, _ in draft_chains(paged, rows)]
        assert [chain for chain, _ in chains.draft(rows)] == expected
        signatures.append(list(llama_kernels.draft.signatures))
    assert signatures[0] == signatures[1]


def test_compiled_without_a_cache_folder_compiles() -> None:
    names: dict[str, Callable[[int], int]] = {}
    exec("def twice(x):\n    return 2 * x", names)  # no file, so no folder beside it
    assert compiled(names["twice"])(21) == 42


@pytest.mark.parametrize(
    "model",
    [
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)),
        LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
        Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
        GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=1, n_head=2)),
    ],
    ids=["sliding window", "biases", "norms of heads", "another architecture"],
)
def test_llama_chains_for_other_models_leave_them_to_torch(model: torch.nn.Module) -> None:
    assert LlamaChains.of(built(model)) is None


def test_llama_chains_for_large_models_leave_them_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LlamaChains.of(built(llama())) is not None
    monkeypatch.setattr("outrider.drafting.cpu.llama_chains._MAX_WEIGHTS", 1000)
    assert LlamaChains.of(built(llama())) is None


def test_llama_chains_for_rounded_weights_leave_them_to_torch() -> None:
    paged = built(llama())
    assert isinstance(paged.network, FusedLlama)
    product = paged.network.layers[1].down
    assert isinstance(product, PackedLinear)
    product.round_to_int8(Mock())
    assert LlamaChains.of(paged) is None
