"""CUDA graphs and the memory budget on a device: texts, near ties, and no memory later."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.batch import PackedBatch
from outrider.engine.cuda.sampling import choose_and_verify
from outrider.engine.cuda.trees import place_nodes, walk_nodes
from outrider.engine.engine import Engine
from outrider.engine.graphs.capture import CudaGraphs
from outrider.engine.graphs.decode_buckets import Bucket, make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.prefill_graphs import PrefillGraphs
from outrider.engine.graphs.prefill_inputs import make_prefill_buckets
from outrider.engine.graphs.tree_inputs import TreeWork
from outrider.engine.model.loader import ModelOptions, build_paged_model, load_model
from outrider.engine.model.memory_budget import TRIAL_PAGES, DeviceMemory
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import Runner, StepRunner
from outrider.errors import ConfigError
from outrider.models.resolve import resolve_model
from outrider.params import SamplingParams, StopParams, TokenIds
from outrider.policy.base import FixedPolicy
from outrider.types import Request, TokenLogprobs
from scorer_service.device import StepLimits, capture_steps, size_cache
from tests.support.models.architectures import ARCHITECTURES, random_model

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
K = 4
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=2**64 - 1),
    SamplingParams(temperature=1.2, seed=2**31, top_k=12, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.6, logit_bias=((7, 0.5), (9, -3.0))),
    SamplingParams(temperature=0.9, seed=11, frequency_penalty=0.6, presence_penalty=0.4),
)
PROMPTS = Path("outrider/models/data/heldout_prompts.jsonl")


def graph_runner(model: PagedModel, max_num_seqs: int) -> DecodeGraphs:
    record = CudaGraphs()
    forwards = None
    if model.layered:
        sizes = make_prefill_buckets(64, max_num_seqs, trees=True)
        forwards = PrefillGraphs(model, sizes, capture=record)
    ragged = [
        Bucket(K + 1, max_num_seqs, trees, max_num_seqs + tokens)
        for trees in (False, True)
        for tokens in (max_num_seqs // 2, 2 * max_num_seqs)
    ]
    return DecodeGraphs(
        model,
        [*make_buckets(max_num_seqs, (1, K + 1), (K + 1,)), *ragged],
        capture=record,
        choose_and_verify=choose_and_verify,
        trees=TreeWork(place_nodes, walk_nodes),
        forwards=forwards,
    )


def generate(
    model: PagedModel,
    runner: StepRunner,
    requests: Sequence[Request],
    truth: Sequence[TokenIds] | None = None,
    told: dict[int, list[TokenLogprobs]] | None = None,
) -> list[TokenIds]:
    """What the engine says to each request; drafts follow `truth`, with mistakes, if given.

    Log probabilities, where requests ask for them, go to `told`.
    """
    config = EngineConfig(
        page_size=model.page_size,
        num_pages=model.num_pages,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=model.max_model_len,
        num_speculative_tokens=K,
    )
    engine = Engine(model, config, policy=FixedPolicy(K, max_wait_s=0.0), runner=runner)
    rng = random.Random(0)
    said: list[TokenIds] = [()] * len(requests)
    left = set(range(len(requests)))
    for request in requests:
        engine.submit(request)
        engine.set_drafting(request.session_id, DraftOffer("a", K))
    while left:
        for i in left if truth is not None else ():
            future = [t if rng.random() < 0.8 else 3 for t in truth[i][len(said[i]) :][:6]]
            base = len(requests[i].prompt_token_ids) + len(said[i])
            parents = list(range(-1, len(future) - 1))
            if rng.random() < 0.5:  # the true path is not the preferred one
                future, parents = [3, *future], [-1, *(p + 1 if p >= 0 else -1 for p in parents)]
            tree = DraftTree.validated(
                base, future, parents, vocab_size=model.vocab_size, max_nodes=8
            )
            engine.post_block(PostedBlock(requests[i].session_id, tree, "a", 1))
        events = engine.step()
        assert events is not None
        assert not events.failures
        for commit in events.commits:
            said[commit.session_id] += commit.token_ids
            if told is not None:
                told.setdefault(commit.session_id, []).extend(commit.logprobs)
            if commit.finish_reason is not None:
                left.discard(commit.session_id)
    engine.check_invariants()
    return said


def requests_of(
    prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], n: int
) -> list[Request]:
    return [
        Request(
            i,
            tuple(prompt),
            sampling=samplings[i % len(samplings)],
            stop=StopParams(max_tokens=n, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]


def tiny(device: torch.device, dtype: torch.dtype) -> PagedModel:
    return build_paged_model(
        random_model(ARCHITECTURES["llama"], dtype).to(device),
        ModelOptions(page_size=4, num_pages=400, max_model_len=100),
    )


@pytest.mark.parametrize("drafts", [False, True])
def test_graphs_of_tiny_model_keep_texts_of_cpu(drafts: bool) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    requests = requests_of(prompts, SAMPLINGS, 40)
    on_cpu = tiny(CPU, torch.float32)
    truth = generate(on_cpu, Runner(on_cpu), requests)
    model = tiny(CUDA, torch.float32)
    runner = graph_runner(model, 8)
    assert generate(model, runner, requests, truth if drafts else None) == truth
    assert generate(model, Runner(model), requests, truth if drafts else None) == truth


def test_graphs_of_tiny_model_keep_logprobs_of_cpu() -> None:
    prompts = [[5, 6, 7 + i] for i in range(len(SAMPLINGS))]
    requests = [replace(r, top_logprobs=3) for r in requests_of(prompts, SAMPLINGS, 20)]
    on_cpu, model = tiny(CPU, torch.float32), tiny(CUDA, torch.float32)
    expected: dict[int, list[TokenLogprobs]] = {}
    truth = generate(on_cpu, Runner(on_cpu), requests, told=expected)
    for runner in (graph_runner(model, 8), Runner(model)):
        told: dict[int, list[TokenLogprobs]] = {}
        assert generate(model, runner, requests, truth, told) == truth
        for session, entries in expected.items():
            assert len(entries) == len(told[session]) == 20
            for want, got in zip(entries, told[session], strict=True):
                assert got.logprob == pytest.approx(want.logprob, abs=1e-3)
                likely = [logprob for _, logprob in want.top]
                assert [logprob for _, logprob in got.top] == pytest.approx(likely, abs=1e-3)


def embedded_prompts(count: int) -> list[list[int]]:
    folder = resolve_model("embedded", "target")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:count]]
    return [tokenizer.encode(text).ids[:200] for text in texts]


def embedded(device: torch.device, dtype: torch.dtype) -> PagedModel:
    return load_model(
        resolve_model("embedded", "target"),
        ModelOptions(page_size=64, num_pages=64, max_model_len=400),
        dtype=dtype,
        device=device,
    )


def test_graphs_of_embedded_model_in_float32_keep_texts_of_cpu() -> None:
    requests = requests_of(embedded_prompts(8), (GREEDY,), 64)
    on_cpu = embedded(CPU, torch.float32)
    truth = generate(on_cpu, Runner(on_cpu), requests)
    model = embedded(CUDA, torch.float32)
    runner = graph_runner(model, 8)
    assert generate(model, runner, requests) == truth
    assert generate(model, runner, requests, truth) == truth


def test_graphs_in_bfloat16_differ_from_eager_at_near_ties_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests = requests_of(embedded_prompts(8), (GREEDY,), 64)
    model = embedded(CUDA, torch.bfloat16)
    eager = generate(model, Runner(model), requests)
    captured = generate(model, graph_runner(model, 8), requests, eager)
    gaps = []
    for request, a, b in zip(requests, eager, captured, strict=True):
        parted = next((i for i in range(len(a)) if a[i] != b[i]), None)
        if parted is None:
            continue
        prefix = Request(0, (*request.prompt_token_ids, *a[:parted]))
        logits = last_logits(model, prefix.prompt_token_ids)
        gaps.append((parted, float(logits[a[parted]] - logits[b[parted]])))
    with capsys.disabled():
        print(f"\nbfloat16: {len(gaps)} of {len(requests)} texts part; (token, logit gap): {gaps}")
    assert all(abs(gap) < 0.5 for _, gap in gaps)


def last_logits(model: PagedModel, tokens: TokenIds) -> torch.Tensor:
    from outrider.engine.batch import RowSlice, pack

    table = range(-(-len(tokens) // model.page_size))
    batch: PackedBatch = pack([RowSlice(tokens, 0, table, 1)], model.page_size, model.device)
    return model.forward(batch)[0]


@pytest.mark.parametrize("k", [0, 1])
def test_drafts_of_one_token_have_no_captured_trees(k: int) -> None:
    limits, model = (
        StepLimits(4, 64, k, trees=True),
        cast(PagedModel, SimpleNamespace(layered=True)),
    )
    assert not any(bucket.trees for bucket in (*limits.buckets(), *limits.prefill_buckets(model)))


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="others take the device's memory")
def test_size_cache_before_serving_leaves_memory_constant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[str] = []
    limits = StepLimits(16, max_num_batched_tokens=512, num_speculative_tokens=K, trees=True)
    memory = DeviceMemory(CUDA, 0.2)
    model = load_model(
        resolve_model("embedded", "target"),
        ModelOptions(page_size=64, num_pages=TRIAL_PAGES),
        dtype=torch.bfloat16,
        device=CUDA,
    )
    size_cache(memory, model, limits, lines.append)
    runner = capture_steps(model, limits, lines.append)
    assert runner is not None
    assert 0.8 * memory.limit < memory.used() <= memory.limit
    requests = requests_of(embedded_prompts(8), SAMPLINGS, 64)
    generate(model, runner, requests)
    before = memory.used()
    generate(model, runner, requests)
    torch.cuda.synchronize()
    assert memory.used() == before <= memory.limit
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_device_memory_beyond_free_is_refused() -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization 1 asks for"):
        DeviceMemory(CUDA, 1.0)
