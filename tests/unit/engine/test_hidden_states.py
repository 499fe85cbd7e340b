"""What is captured of a model's forward: the states that `transformers` itself would return."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.aux_layers import default_layers, trained_layers
from outrider.engine.batch import RowSlice, pack
from outrider.engine.graphs.decode_buckets import Bucket
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.loader import (
    ModelOptions,
    build_paged_model,
    kv_bytes_per_page,
    read_features,
)
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import Runner, StepRunner
from outrider.engine.sampling.verify import choose_and_verify
from outrider.engine.sequence import Sequence
from outrider.engine.step import ScheduledRow, Step
from outrider.errors import ConfigError, UnsupportedModelError
from outrider.features import FeatureSpec, parse_features
from outrider.policy.row import Drafting, Offered
from outrider.types import Request
from tests.support.models.architectures import ARCHITECTURES, random_model
from tests.support.models.recordable import rerun
from tests.support.services.sent_features import write

PAGE_SIZE, NUM_PAGES, LENGTH = 4, 16, 22
TABLE = [9, 3, 14, 1, 6, 11]
WAYS = [
    *((name, True) for name in ("llama", "qwen2", "qwen3", "mistral")),
    *((name, False) for name in ARCHITECTURES),
]
EDGES = (0, 5, 6, 13, 14, LENGTH)  # of chunks


def spec_of(model: nn.Module) -> FeatureSpec:
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    return FeatureSpec(text.hidden_size, (0, 1, text.num_hidden_layers), final_norm=True)


@torch.inference_mode()
def expected(model: nn.Module, spec: FeatureSpec, tokens: Tensor) -> Tensor:
    """float32 [n, captured_width], by the model itself, with its own attention and no cache."""
    left: list[Tensor] = []
    parts: Any = model
    count = max(spec.layers)
    [layers] = [
        child
        for child in parts.get_decoder().children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    # transformers tells what left the last layer only after the norm.
    handle = layers[-1].register_forward_hook(
        lambda _m, _a, out: left.append(out if isinstance(out, Tensor) else out[0])
    )
    parts.set_attn_implementation("eager")
    states = parts(tokens[None], output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    return torch.cat([states[0][0], states[1][0], left[0][0], states[-1][0]], dim=1)


def slots_of(positions: Tensor, table: list[int] = TABLE) -> Tensor:
    return torch.tensor(table)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE


def pool_of(model: PagedModel) -> HiddenStatePool:
    assert model.pools.features is not None
    return model.pools.features


def check(rows: Tensor, states: Tensor) -> None:
    """Equal but for rounding: to bfloat16, 2^-8, of sums made in another order."""
    torch.testing.assert_close(rows.float(), states, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(("name", "fused"), WAYS)
def test_hidden_states_equal_those_of_transformers(name: str, fused: bool) -> None:
    """In chunks, with a rejected draft after each, which the next chunk writes over."""
    source = random_model(ARCHITECTURES[name], torch.float32)
    spec = spec_of(source)
    vocab_size = source.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(0, vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    states = expected(source, spec, tokens)
    model = build_paged_model(
        source, ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, fused=fused, features=spec)
    )
    pool_of(model).rows.fill_(float("nan"))
    for start, end in pairwise(EDGES):
        for wrong in (1, 0):  # a guess that is rejected, then the truth
            chunk = [(token + wrong) % vocab_size for token in tokens[start:end].tolist()]
            model.forward(pack([RowSlice(chunk, start, TABLE, 1)], PAGE_SIZE, model.device))
    rows = pool_of(model).read(slots_of(torch.arange(LENGTH)), spec, None)
    assert rows.dtype is torch.bfloat16
    check(rows, states)


def test_hidden_state_pool_read_with_spec_returns_its_layers_in_order() -> None:
    spec = FeatureSpec(2, (1, 4), final_norm=True)
    pool = HiddenStatePool(spec, 2, PAGE_SIZE, torch.device("cpu"))
    slots = torch.tensor([6, 3])
    pool.enter(4, slots, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    pool.enter(2, slots, torch.tensor([[9.0, 9.0], [9.0, 9.0]]))  # not asked for
    pool.final(slots, torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    asked = FeatureSpec(2, (4,), final_norm=True)
    assert pool.read(torch.tensor([3, 6]), asked, None).tolist() == [[3, 4, 7, 8], [1, 2, 5, 6]]
    back = FeatureSpec(2, (4, 1))
    assert pool.read(torch.tensor([6]), back, None).tolist() == [[1, 2, 0, 0]]
    matrix = torch.tensor([[1.0, 0.0, 2.0, 0.0]], dtype=torch.bfloat16)
    assert pool.read(torch.tensor([6]), asked, matrix).tolist() == [[11]]


def test_kv_pools_when_slots_move_move_their_hidden_states() -> None:
    features = FeatureSpec(2, (0,))
    pools = KVPools(3, 2, torch.float32, torch.device("cpu"), features=features)
    assert pools.features is not None
    rows = pools.features.rows
    rows.copy_(torch.arange(12.0).view(6, 2))
    pools.move_slots(torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert rows[:, 0].tolist() == [2, 4, 4, 6, 8, 10]
    pools.copy_pages(torch.tensor([0]), torch.tensor([2]))
    assert rows[:, 0].tolist() == [2, 4, 4, 6, 2, 4]


def make_step(vocab_size: int) -> Step:
    """Three rows that have caught up, with 0, 3 and 1 draft tokens."""
    rng = random.Random(5)
    rows: list[ScheduledRow] = []
    for i, (start, num_drafts) in enumerate(((5, 0), (9, 3), (0, 1))):
        seq = Sequence(
            Request(i, (1,)),
            max_len=40,
            stop_ids=frozenset(),
            drafting=Drafting(Offered(4)),
            submitted_at=0.0,
        )
        seq.block_table = [4 * i + page for page in (2, 0, 3, 1)]
        tokens = tuple(rng.randrange(vocab_size) for _ in range(1 + num_drafts))
        piece = RowSlice(tokens, start, seq.block_table, len(tokens))
        rows.append(ScheduledRow(seq, piece, tokens[1:]))
    return Step(tuple(rows), 7)


def test_hidden_states_of_captured_step_equal_eager_ones() -> None:
    """What fills its rows up is captured on the scratch page, which belongs to nobody."""
    source = random_model(ARCHITECTURES["llama"], torch.float64)
    model = build_paged_model(
        source, ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, features=spec_of(source))
    )
    graphs = DecodeGraphs(model, [Bucket(4, 4)], capture=rerun, choose_and_verify=choose_and_verify)
    step, rows = make_step(model.vocab_size), pool_of(model).rows
    owned = slice(0, NUM_PAGES * PAGE_SIZE)
    rows.fill_(0)
    Runner(model).launch(step).wait()
    eager = rows[owned].clone()
    rows.fill_(0)
    graphs.launch(step).wait()
    assert torch.equal(rows[owned], eager)
    assert int((eager != 0).any(dim=1).sum()) == 7


@pytest.mark.parametrize("captured", [False, True])
def test_engine_with_features_sends_the_models_hidden_states(captured: bool) -> None:
    """Chunked prompts, shared pages, accepted and rejected drafts, projected."""
    source = random_model(ARCHITECTURES["llama"], torch.float64)
    spec = spec_of(source)
    shared = [5, 6, 7, 8, 9, 10, 11, 12]
    prompts = [[*shared, 1], [*shared, 2, 3, 4], [7] * 19]
    matrix = torch.randn(6, spec.captured_width, generator=torch.Generator().manual_seed(2))
    matrix = matrix.to(torch.bfloat16)
    asked = replace(spec, projection_dim=6, projection_sha256=bytes(32))
    model = build_paged_model(
        copy.deepcopy(source), ModelOptions(page_size=4, num_pages=64, features=spec)
    )
    runner: StepRunner = Runner(model)
    if captured:
        runner = DecodeGraphs(
            model, [Bucket(1, 4), Bucket(4, 4)], capture=rerun, choose_and_verify=choose_and_verify
        )
    texts, rows = write(model, runner, prompts, asked, matrix)
    for text, got in zip(texts, rows, strict=True):
        assert len(text) - len(got) <= 5  # the last step's are of no use to anybody
        states = expected(source, spec, torch.tensor(text))[: len(got)]
        wanted = states.to(torch.bfloat16).float() @ matrix.float().T
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=0.05)


def test_kv_memory_with_hidden_states_counts_them() -> None:
    source = random_model(ARCHITECTURES["llama"], torch.float32)
    spec = spec_of(source)
    plain = build_paged_model(
        random_model(ARCHITECTURES["llama"], torch.float32),
        ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, self_test=False),
    )
    model = build_paged_model(
        source,
        ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, features=spec, self_test=False),
    )
    more = model.kv_bytes_per_page - plain.kv_bytes_per_page
    assert more == PAGE_SIZE * 4 * spec.hidden_size * 2
    model.resize(5)
    assert len(pool_of(model).rows) == 6 * PAGE_SIZE  # one page is for scratch


def test_kv_bytes_per_page_from_folder_equals_loaded_model(tmp_path: Path) -> None:
    source: Any = random_model(ARCHITECTURES["llama"], torch.float32)
    source.save_pretrained(tmp_path)
    spec = read_features(tmp_path, "1,final")
    assert spec == FeatureSpec(source.config.hidden_size, (1,), final_norm=True)
    computed = kv_bytes_per_page(tmp_path, dtype=torch.float32, page_size=PAGE_SIZE, features=spec)
    model = build_paged_model(
        source,
        ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, features=spec, self_test=False),
    )
    assert computed == model.kv_bytes_per_page


@pytest.mark.parametrize(
    ("text", "layers", "final"),
    [
        ("final", (), True),
        ("eagle3", (2, 16, 29), False),
        ("32", (32,), False),
        ("7, 2,final, 2", (2, 7), True),
        ("eagle3,final,0", (0, 2, 16, 29), True),
    ],
)
def test_parse_features_of_valid_values_accepts_them(
    text: str, layers: tuple[int, ...], final: bool
) -> None:
    assert parse_features(text, 32, 8) == FeatureSpec(8, layers, final)


@pytest.mark.parametrize(("num_layers", "layers"), [(8, (2, 4, 5, 7)), (24, (2, 12, 21))])
def test_parse_features_of_eagle3_includes_its_trained_layers(
    num_layers: int, layers: tuple[int, ...]
) -> None:
    assert parse_features("eagle3", num_layers, 8).layers == layers
    assert {*trained_layers(num_layers), *default_layers(num_layers)} == set(layers)


@pytest.mark.parametrize(
    ("text", "num_layers", "word"),
    [
        ("", 4, "''"),
        ("5", 4, "0 to 4"),
        ("-1", 4, "'-1'"),
        ("\u0663", 4, "0 to 4"),
        ("last", 4, "'final'"),
        ("eagle3", 5, "6 layers"),
    ],
)
def test_parse_features_of_invalid_values_refuses(text: str, num_layers: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_features(text, num_layers, 8)


def test_hidden_state_hooks_on_model_without_layer_list_refuse() -> None:
    source: Any = random_model(ARCHITECTURES["gemma2"], torch.float32)
    spec = spec_of(source)
    source.model.more = nn.ModuleList(nn.Identity() for _ in source.model.layers)
    with pytest.raises(UnsupportedModelError, match="--hidden-features"):
        build_paged_model(
            source, ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, features=spec)
        )
