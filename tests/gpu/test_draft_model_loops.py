"""Captured draft loops on CUDA graphs, against the eager way on the same device.

What needs no graph also runs on Triton's interpreter:
TRITON_INTERPRET=1 pytest -m gpu -W ignore::RuntimeWarning tests/gpu
"""

import os
import random

import pytest
import torch

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

from outrider.drafting.draft_model.loops import DraftModelLoops  # noqa: E402
from outrider.drafting.drafters import DraftInput, FedRows  # noqa: E402
from outrider.drafting.graphs import loop_inputs  # noqa: E402
from outrider.drafting.graphs.beams import Beam  # noqa: E402
from outrider.drafting.graphs.chains import draft_chains, draft_forks  # noqa: E402
from outrider.drafting.graphs.loop_inputs import make_shapes  # noqa: E402
from outrider.drafting.graphs.loops import (  # noqa: E402
    DraftSampler,
    LoopCapture,
    triton_sampler,
)
from outrider.drafting.likeliest import BiasedLogits, top_candidates  # noqa: E402
from outrider.engine.batch import RowSlice, pack  # noqa: E402
from outrider.engine.graphs.capture import CudaGraphs  # noqa: E402
from outrider.engine.model.paged_model import PagedModel  # noqa: E402
from outrider.engine.sampling.sample import SamplingBatch  # noqa: E402
from outrider.params import SamplingParams  # noqa: E402
from tests.support.models.clear_llama import clear_llama  # noqa: E402

pytestmark = pytest.mark.gpu

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=2**64 - 1),
    SamplingParams(temperature=1.2, seed=2**31, top_k=12, top_p=0.9, min_p=0.01),
)
graphs = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA graphs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [97, 5000])
def test_triton_candidates_equal_torch(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(len(SAMPLINGS), vocab_size, generator=generator)).to(dtype).to(DEVICE)
    logits[0, 7] = logits[0, 90] = logits[0].max() + 1
    batch = SamplingBatch.build(SAMPLINGS, [3, 50, 900, 2**20], DEVICE)
    tokens, gaps = triton_sampler().candidates(logits, batch, 3)
    expected, expected_gaps = top_candidates(logits.float(), batch, 3)
    assert tokens[1:].tolist() == expected[1:].tolist()
    assert tokens[0, :2].tolist() == [7, 90]
    torch.testing.assert_close(gaps, expected_gaps)
    assert triton_sampler().choose(logits, batch).tolist() == tokens[:, 0].tolist()


@pytest.mark.parametrize("vocab_size", [130, 5000])
def test_triton_candidates_of_equal_scores_are_the_lowest_tokens(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(0, 30, (3, vocab_size), generator=generator).float()
    logits[1] = 2.0
    logits[2, :-1] = -torch.inf
    batch = SamplingBatch.build([SAMPLINGS[0]] * 3, [3, 50, 900], DEVICE)
    tokens, gaps = triton_sampler().candidates(logits.to(DEVICE), batch, 8)
    scores, expected = logits.sort(dim=1, descending=True, stable=True)
    assert tokens.tolist() == expected[:, :8].tolist()
    assert gaps[:2].tolist() == (scores[:2, :1] - scores[:2, :8]).tolist()


def test_triton_candidates_beyond_cuts_have_infinite_gaps() -> None:
    logits = torch.arange(3000, dtype=torch.float32, device=DEVICE)[None].contiguous()
    batch = SamplingBatch.build([SamplingParams(temperature=1.0, top_k=2)], [3], DEVICE)
    tokens, gaps = triton_sampler().candidates(logits, batch, 4)
    assert set(tokens[0, :2].tolist()) == {2998, 2999}
    assert gaps[0].isinf().tolist() == [False, False, True, True]


PLACES = [3, 50, 900, 2**20]


def same_likeliest(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for each, other in zip(found, expected, strict=True):
        assert each.dtype is other.dtype
    assert found[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("vocab_size", [4, 3000])
def test_triton_likeliest_equal_torch(vocab_size: int, count: int, dtype: torch.dtype) -> None:
    """Each path has a row of its own, and the first row has an impossible token."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randperm(len(SAMPLINGS) * 3 * vocab_size, generator=generator)
    logits = (logits.view(len(SAMPLINGS), 3, -1) / 40 % 7).float().to(DEVICE)  # no near ties
    logits[:, 1, 2] = -torch.inf
    logits = logits.to(dtype)
    batch = SamplingBatch.build(SAMPLINGS[1:] * 2, PLACES[:1] * 6, DEVICE)[: len(SAMPLINGS)]
    count = min(count, vocab_size)
    for depth in (0, 5):
        found = triton_sampler().likeliest(logits, batch, depth, count)
        same_likeliest(found, DraftSampler().likeliest(logits, batch, depth, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [8, 100])
@pytest.mark.parametrize("known", [300])
@pytest.mark.parametrize("num_paths", [1, 3])
@pytest.mark.parametrize("sampling", [SAMPLINGS, SAMPLINGS[:1] * 4], ids=["any", "greedy"])
def test_triton_likeliest_of_biased_logits_equal_torch(
    sampling: tuple[SamplingParams, ...],
    num_paths: int,
    known: int,
    rank: int,
    dtype: torch.dtype,
) -> None:
    """The slot lies between others, and every third token is known."""
    generator = torch.Generator().manual_seed(rank)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    n, vocab_size, ids = len(sampling), 3 * known, torch.arange(1, 3 * known, 3, device=DEVICE)
    logits, table, weight = randn(n, 5, known)[:, 2:3], randn(90, rank), randn(known, rank)
    before = torch.randint(90, (n * num_paths,), generator=generator).to(DEVICE)

    def dense() -> torch.Tensor:
        sums = (table[before].float() @ weight.float().t()).view(n, num_paths, known)
        all_ = torch.full((n, num_paths, vocab_size), -torch.inf, device=DEVICE)
        return all_.index_copy_(2, ids, sums + logits.float())

    batch = SamplingBatch.build(sampling, PLACES, DEVICE)
    biased = BiasedLogits(logits, ids, (table, before, weight), dense)
    for depth, count in ((0, 1), (3, 4)):
        found = triton_sampler().likeliest(biased, batch, depth, count)
        same_likeliest(found, DraftSampler().likeliest(biased, batch, depth, count))
    every = BiasedLogits(logits, None, (table, before, weight), lambda: dense()[..., ids])
    found = triton_sampler().likeliest(every, batch, 1, 3)
    same_likeliest(found, DraftSampler().likeliest(every, batch, 1, 3))


@pytest.mark.parametrize(("num_paths", "count", "width"), [(1, 3, 5), (3, 3, 4), (4, 2, 8)])
def test_triton_beam_and_best_nodes_equal_torch(num_paths: int, count: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_paths)
    n = 5
    chances = -torch.rand(n, num_paths, count, generator=generator)
    chances[1, 0] = -torch.inf
    chances = chances.sort(dim=2, descending=True).values.to(DEVICE)
    found = torch.randint(1000, chances.shape, generator=generator).to(DEVICE)
    beam = Beam(
        tokens=torch.zeros(n, num_paths, dtype=torch.int64, device=DEVICE),
        scores=-torch.rand(n, num_paths, generator=generator).to(DEVICE),
        nodes=torch.randint(-1, 40, (n, num_paths), generator=generator).to(DEVICE),
        sources=torch.zeros(n, num_paths, dtype=torch.int64, device=DEVICE),
    )
    by_triton, by_torch = triton_sampler(), DraftSampler()
    grown, nodes = by_triton.grow_beam(beam, found, chances, width, 40)
    expected, expected_nodes = by_torch.grow_beam(beam, found, chances, width, 40)
    assert torch.equal(nodes, expected_nodes)
    possible = expected.scores > -torch.inf
    for each, other in zip(grown, expected, strict=True):
        assert each.dtype is other.dtype
        assert torch.equal(each[possible], other[possible])

    beam, levels, total = Beam.roots(found[:, 0, 0]), [], 0
    for _ in range(4):
        shape = (n, beam.tokens.shape[1], count)
        chances = -torch.rand(shape, generator=generator)
        chances[1, :, 1:] = -torch.inf
        chances = chances.to(DEVICE)
        found = torch.randint(1000, shape, generator=generator).to(DEVICE)
        beam, nodes = by_triton.grow_beam(beam, found, chances, width, total)
        levels.append(nodes)
        total += nodes.shape[2]
    tree = torch.cat(levels, dim=2)
    for num_nodes in (1, 6, total, total + 3):
        best = by_triton.best_nodes(tree, num_nodes)
        assert torch.equal(best, by_torch.best_nodes(tree, num_nodes))
        for parents in best[:, 1].tolist():
            assert all(parent < place for place, parent in enumerate(parents))
        never = best[:, 2].view(torch.float32) == -torch.inf
        assert never[1].any() == (num_nodes > 1)
        copies = best[:, :2, :1].expand_as(best[:, :2])[never[:, None].expand(-1, 2, -1)]
        assert torch.equal(best[:, :2][never[:, None].expand(-1, 2, -1)], copies)


def llama() -> PagedModel:
    return clear_llama(DEVICE, num_pages=300)


def fed_rows(
    model: PagedModel, rng: random.Random, count: int, room: int
) -> tuple[list[RowSlice], list[RowSlice]]:
    """Rows of which 1 or 2 tokens are to be fed, and the same from their first token on."""
    free = rng.sample(range(model.num_pages), model.num_pages)
    short, whole = [], []
    for _ in range(count):
        text = [rng.randrange(1000) for _ in range(rng.randint(5, 120))]
        pages = [free.pop() for _ in range(-(-(len(text) + room) // 16))]
        own = [free.pop() for _ in pages]
        start = len(text) - rng.randint(1, 2)
        model.forward(pack([RowSlice(text[:start], 0, pages, 1)], 16, DEVICE))
        short.append(RowSlice(text[start:], start, pages, 1))
        whole.append(RowSlice(text, 0, own, 1))
    return short, whole


@graphs
def test_captured_chains_on_gpu_equal_eager_chains() -> None:
    model = llama()
    assert model.capturable
    shapes = [
        shape
        for fanout in (0, 3)
        for cut in (False, True)
        for shape in make_shapes(
            rows=(1, 4, 8), query_lens=(2,), num_tokens=(4,), fanout=fanout, cut=cut
        )
    ]
    drafter = DraftModelLoops(model, LoopCapture(shapes, CudaGraphs(), triton_sampler()))
    for seed in range(20):
        rng = random.Random(seed)
        short, whole = fed_rows(model, rng, rng.randint(1, 8), 6)
        sampling = [rng.choice(SAMPLINGS) for _ in short]
        pairs = [
            [DraftInput(row, 4, params) for row, params in zip(rows, sampling, strict=True)]
            for rows in (short, whole)
        ]
        assert drafter.draft(pairs[0]) == draft_chains(model, pairs[1])
        batch = drafter.forks(FedRows(short, sampling), 4, 3, beyond=True)
        again = drafter.forks(FedRows(short, sampling), 4, 3, beyond=True).forks
        eager = draft_forks(model, FedRows(whole, sampling), 5, 3)
        assert batch.forks.candidates.tolist() == eager.candidates[:, :-1].tolist()
        assert again.candidates.tolist() == eager.candidates[:, :-1].tolist()
        assert batch.beyond.candidates.tolist() == eager.candidates[:, -1:].tolist()


@graphs
def test_captured_forks_with_copied_pages_copy_them_first() -> None:
    model = llama()
    shapes = make_shapes(rows=(2, 4), query_lens=(1,), num_tokens=(4,), fanout=2)
    drafter = DraftModelLoops(model, LoopCapture(shapes, CudaGraphs(), triton_sampler()))
    rng = random.Random(2)
    text = [rng.randrange(1000) for _ in range(21)]
    model.forward(pack([RowSlice(text[:20], 0, [5, 9], 1)], 16, DEVICE))
    sampling = [SAMPLINGS[0]] * 2
    tables = [[5, 40], [5, 41]]  # the second page is copied for each
    rows = [RowSlice([token], 20, table, 1) for token, table in zip((7, 8), tables, strict=True)]
    forks = drafter.forks(FedRows(rows, sampling), 4, 2, copies=[(9, 40), (9, 41)]).forks
    for i, token in enumerate((7, 8)):
        whole = RowSlice([*text[:20], token], 0, [100, 101], 1)
        eager = draft_forks(model, FedRows([whole], sampling[:1]), 4, 2)
        assert forks.candidates[i].tolist() == eager.candidates[0].tolist()


@graphs
def test_captured_branches_with_shared_pages_equal_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_inputs, "_SHARING_ROWS", 1)
    model, rng, k = llama(), random.Random(4), 3
    shapes = make_shapes(rows=(16,), query_lens=(1, 2), num_tokens=(k,), fanout=2)
    drafter = DraftModelLoops(model, LoopCapture(shapes, CudaGraphs(), triton_sampler()))
    free, slices, whole, copies = list(range(model.num_pages)), [], [], []
    for length, count in ((70, 7), (31, 3), (47, 1)):
        text = [rng.randrange(1000) for _ in range(length)]
        trunk = [free.pop() for _ in range(-(-length // 16))]
        model.forward(pack([RowSlice(text, 0, trunk, 1)], 16, DEVICE))
        for _ in range(count):
            start = length - rng.randint(0, 4)
            token, first = rng.randrange(1000), start // 16
            own = [free.pop(), free.pop()]
            if start % 16:
                copies.append((trunk[first], own[0]))
            slices.append(RowSlice([token], start, trunk[:first] + own, 1))
            alone = [free.pop() for _ in range(8)]
            whole.append(RowSlice([*text[:start], token], 0, alone, 1))
    sampling = [SAMPLINGS[i % 2] for i in range(len(slices))]
    batch = drafter.forks(FedRows(slices, sampling), k, 2, copies, beyond=True)
    eager = draft_forks(model, FedRows(whole, sampling), k + 1, 2)
    assert batch.forks.candidates.tolist() == eager.candidates[:, :-1].tolist()
    assert batch.beyond.candidates.tolist() == eager.candidates[:, -1:].tolist()
