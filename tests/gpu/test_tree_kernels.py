"""Trees of captured steps on a GPU, or in Triton's interpreter, as PyTorch handles them."""

import os
import random

import pytest
import torch

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from outrider.draft_tree import depths  # noqa: E402
from outrider.engine.cuda import trees as kernels  # noqa: E402
from outrider.engine.graphs import tree_inputs  # noqa: E402
from outrider.engine.sampling.sample import SamplingBatch  # noqa: E402
from outrider.engine.sampling.verify import VerifyBatch  # noqa: E402
from outrider.engine.tree_mask import TreeMask, lineages  # noqa: E402
from outrider.params import SamplingParams  # noqa: E402

pytestmark = pytest.mark.gpu
LONGEST, SCRATCH = 70, 7000


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 7, 16, 33, 64])
def test_triton_tree_work_equals_torch(count: int, seed: int) -> None:
    """Rows have any length, their tokens may be padding, and siblings may be repeated."""
    rng = random.Random(seed)
    lens = [rng.randint(1, count + 1) for _ in range(5)]
    nodes = [rng.randint(0, each - 1) for each in lens]  # the others are padding
    ends = [sum(lens[:i]) for i in range(len(lens) + 1)]
    columns = torch.zeros(5, count + 1, dtype=torch.int64)  # the last one is unused
    for row in columns:
        row[:count] = torch.tensor([rng.randint(max(-1, i - 3), i - 1) for i in range(count)])
    above, columns, vocab = columns[:, :-1].tolist(), columns.to(DEVICE), 3
    tokens = torch.tensor([rng.randrange(vocab) for _ in range(ends[-1])], device=DEVICE)
    starts = torch.tensor([rng.randint(1, 60) for _ in lens], dtype=torch.int32, device=DEVICE)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    draft_lens = torch.tensor(nodes, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor(rng.sample(range(6000), ends[-1]), device=DEVICE)
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(vocab, (5, 2 + count), generator=generator).int()
    for row, size, first, up in zip(choices, nodes, ends, above, strict=False):
        for child in rng.sample(range(size), size):
            row[2 + up[child]] = tokens[first + 1 + child]  # mostly the walk goes on
    choices = choices.to(DEVICE)
    sampling = SamplingBatch.build([SamplingParams()] * ends[-1], [0] * ends[-1], DEVICE)
    batch = VerifyBatch(tokens, cu_seqlens, draft_lens, sampling)
    parents = columns[:, :-1]
    found = []
    for work in (kernels, tree_inputs):
        visible, positions = torch.zeros_like(tokens), torch.zeros_like(tokens)
        mask = TreeMask(starts, visible)
        work.place_nodes(parents, mask, cu_seqlens, positions, LONGEST)
        out = choices.clone()
        source, target = work.walk_nodes(parents, batch, slots, SCRATCH, out)
        found.append((visible, positions, source, target, out))
    for actual, expected in zip(found[0][:4], found[1][:4], strict=True):
        assert torch.equal(actual, expected)
    actual, expected = found[0][4].tolist(), found[1][4].tolist()
    assert max(nodes) == 0 or max(accepted for accepted, *_ in expected) > (max(nodes) > 4)
    for got, wanted in zip(actual, expected, strict=True):
        end = wanted[0] + 2
        assert got[:end] == wanted[:end]
    for i, up in enumerate(above):
        own = slice(ends[i] + 1, ends[i + 1])
        size = lens[i] - 1
        levels = [min(LONGEST, int(starts[i]) + each) for each in depths(up)[:size]]
        assert found[0][1][own].tolist() == levels
        assert found[0][0][own].tolist() == lineages(up)[:size].tolist()
