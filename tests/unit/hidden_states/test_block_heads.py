"""Block drafters, read from files as they are published, against their formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.aux_layers import states_read
from outrider.drafting.drafters import DraftInput
from outrider.drafting.hidden_states.block_drafter import BlockDrafter
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.heads.dflash import DFlashHead
from outrider.drafting.hidden_states.recorded_blocks import RecordedBlocks
from outrider.drafting.proposer import ProposerLimits
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.batch import RowSlice
from outrider.engine.cpu import int8
from outrider.engine.cpu.ops import NumbaOps
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.errors import ConfigError
from outrider.models.facts import drafting_method
from outrider.models.modules import resolve_module
from outrider.params import SamplingParams
from tests.support.checkpoints import block_checkpoints as made
from tests.support.checkpoints import block_reference as reference
from tests.support.checkpoints import eagle_checkpoints as eagle
from tests.support.checkpoints.eagle_reference import eagle3 as eagle3_formula
from tests.support.checkpoints.loading import load_dflash, load_dspark, load_peagle

CPU = torch.device("cpu")
PAGE_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)
TEXTS = ([5, 90, 17, 3, 88, 41, 2, 60, 33, 12, 7, 54], [9, 8, 7, 6], [61, 62, 63, 64, 65, 66, 67])
PAGES = ([6, 1, 4, 0, 9], [2, 3, 11], [5, 7, 8, 10])  # in no order
Config = dict[str, Any]
int8_only = pytest.mark.skipif(not int8.available(), reason="needs AVX-512 VNNI")


@dataclass(frozen=True)
class Target:
    folder: Path
    embedding: Tensor
    head: Tensor


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = eagle.save_target(tmp_path_factory.mktemp("block") / "target")
    tensors = load_file(folder / "model.safetensors")
    return Target(folder, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])


def _features(text: Sequence[int], width: int) -> Tensor:
    return eagle.features(len(text) - 1, width, seed=len(text))


def _inputs(
    head: DFlashHead, wanted: Sequence[int], texts: Sequence[list[int]] = TEXTS
) -> list[DraftInput]:
    rows = zip(texts, PAGES, wanted, strict=False)
    return [
        DraftInput(
            RowSlice(text[1:], 0, pages, 1),
            count,
            GREEDY,
            features=_features(text, head.features.width),
        )
        for text, pages, count in rows
    ]


def _outputs(
    head: DFlashHead, wanted: Sequence[int], backend: AttentionBackend | None = None
) -> Tensor:
    """The slots' outputs after `TEXTS`, of which each wants so many tokens: [rows, depth, ..]."""
    head.bind(KVPools(12, PAGE_SIZE, head.dtype, CPU))
    backend = backend or choose_backend(None, head.attention_traits(), CPU)
    with torch.inference_mode():
        outputs = head.run(_inputs(head, wanted), backend, PAGE_SIZE)
    assert outputs is not None
    return outputs


def _drafter(head: BlockHead, tree_width: int = 4) -> BlockDrafter:
    pools = KVPools(20, PAGE_SIZE, head.dtype, CPU)
    backend = choose_backend(None, head.attention_traits(), CPU)
    limits = ProposerLimits(max_draft_tokens=9, tree_width=tree_width)
    return BlockDrafter(head, pools, backend, limits)


@dataclass(frozen=True)
class Slots:
    """Names what differs between the formats of DFlash."""

    causal: Sequence[bool] = (False,) * made.NUM_LAYERS
    windows: Sequence[int | None] = (None,) * made.NUM_LAYERS
    output: Tensor | None = None  # layer, unless the target's
    from_anchor: bool = False
    ids: Tensor | None = None  # of the draft vocabulary

    def logits(
        self, text: list[int], count: int, tensors: Mapping[str, Tensor], target: Target
    ) -> Tensor:
        """Return what the formula says of `count` tokens after a text."""
        block = [text[-1]] + [made.MASK_TOKEN] * (count - self.from_anchor)
        outputs = reference.dflash(
            tensors,
            made.DFLASH,
            _features(text, len(made.LAYERS) * eagle.HIDDEN_SIZE),
            target.embedding[torch.tensor(block)],
            causal=self.causal,
            windows=self.windows,
        )[not self.from_anchor :]
        return outputs @ (target.head if self.output is None else self.output).double().T


def _check(head: DFlashHead, tensors: Mapping[str, Tensor], target: Target, slots: Slots) -> None:
    """The slots' logits are what the formula says, whatever the other rows want."""
    wanted = (head.max_depth, 3, 1)
    outputs = _outputs(head, wanted)
    assert outputs.shape[:2] == (3, head.max_depth)
    for text, count, found in zip(TEXTS, wanted, outputs, strict=True):
        with torch.inference_mode():
            known = head.logits(found[:count])
        if slots.ids is not None:
            others = torch.ones(eagle.VOCAB_SIZE, dtype=torch.bool)
            others[slots.ids] = False
            assert bool((known[:, others] == -torch.inf).all())
            known = known[:, slots.ids]
        expected = slots.logits(text, count, tensors, target)
        torch.testing.assert_close(known.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("root", ["", "model."])
def test_dflash_as_published_equals_the_formula(
    tmp_path: Path, target: Target, root: str, dtype: torch.dtype
) -> None:
    tensors = made.dflash_tensors()
    stored = {root + name: tensor for name, tensor in tensors.items()}
    folder = eagle.save_head(tmp_path / "head", stored, made.DFLASH, eagle.save_safetensors)
    head = load_dflash(folder, target.folder, dtype, CPU)
    assert head.features.layers == made.LAYERS
    assert head.max_depth == made.BLOCK_SIZE - 1
    _check(head, tensors, target, Slots())


def test_dflash_of_speculators_with_a_draft_vocabulary_equals_the_formula(
    tmp_path: Path, target: Target
) -> None:
    tensors = made.dflash_tensors(draft_vocab=40)
    config = {**made.SPECULATORS, "sample_from_anchor": True}
    folder = eagle.save_head(tmp_path / "head", tensors, config, eagle.save_safetensors)
    head = load_dflash(folder, target.folder, torch.float64, CPU)
    assert head.features.layers == made.LAYERS
    assert head.max_depth == made.BLOCK_SIZE, "the anchor's own slot guesses, too"
    ids = tensors["d2t"] + torch.arange(40)
    slots = Slots(output=tensors["lm_head.weight"], from_anchor=True, ids=ids)
    _check(head, tensors, target, slots)


@pytest.mark.parametrize(
    ("settings", "causal"),
    [
        ({}, [True, False, True]),  # sliding layers are, unless something is said
        ({"is_causal": False}, [False] * 3),
        ({"causal": True}, [True] * 3),
        ({"sliding_window_non_causal": True}, [False] * 3),
    ],
)
def test_dflash_with_sliding_layers_equals_the_formula(
    tmp_path: Path, target: Target, settings: Config, causal: list[bool]
) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {**made.DFLASH, "layer_types": kinds, "sliding_window": 8, **settings}
    tensors = made.dflash_tensors()
    folder = eagle.save_head(tmp_path / "head", tensors, config)
    head = load_dflash(folder, target.folder, torch.float64, CPU)
    _check(head, tensors, target, Slots(causal, [8, None, 8]))


def test_dflash_with_scaled_embedding_and_logits_equals_the_formula(
    tmp_path: Path, target: Target
) -> None:
    tensors = made.dflash_tensors()
    group = {**made.DFLASH["dflash_config"], "input_embedding_scale": 3.0}
    group |= {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    folder = eagle.save_head(tmp_path / "head", tensors, {**made.DFLASH, "dflash_config": group})
    head = load_dflash(folder, target.folder, torch.float64, CPU)
    outputs = _outputs(head, (2, 2, 2))
    text = TEXTS[0]
    tokens = torch.tensor([text[-1], made.MASK_TOKEN, made.MASK_TOKEN])
    expected = reference.dflash(
        tensors,
        made.DFLASH,
        _features(text, head.features.width),
        target.embedding[tokens] * 3.0,
        causal=[False] * 3,
        windows=[None] * 3,
    )[1:]
    logits = torch.tanh(expected @ target.head.double().T * 0.5 / 2.0) * 2.0
    with torch.inference_mode():
        torch.testing.assert_close(head.logits(outputs[0]).double(), logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dflash_attends_alike_with_every_backend(
    tmp_path: Path, target: Target, kv_heads: int, dtype: torch.dtype
) -> None:
    tensors = made.dflash_tensors(kv_heads=kv_heads, head_dim=32)
    config = {**made.DFLASH, "num_key_value_heads": kv_heads, "head_dim": 32}
    folder = eagle.save_head(tmp_path / "head", tensors, config)
    found = []
    for backend in (None, SdpaAttention):
        head = load_dflash(folder, target.folder, dtype, CPU)
        found.append(_outputs(head, (6, 3, 1), backend))
    tight = 1e-5 if dtype is torch.float32 else 0.05
    for i, count in enumerate((6, 3, 1)):
        parts = [each[i, :count] for each in found]
        torch.testing.assert_close(*parts, rtol=tight, atol=tight)


def test_dflash_with_projected_states_leaves_fc_to_the_scorer(
    tmp_path: Path, target: Target
) -> None:
    tensors = made.dflash_tensors()
    folder = eagle.save_head(tmp_path / "head", tensors, made.DFLASH)
    whole, projected = (
        load_dflash(folder, target.folder, torch.float64, CPU, project=each)
        for each in (False, True)
    )
    assert projected.features.width == eagle.HIDDEN_SIZE
    sent = torch.frombuffer(bytearray(projected.projection), dtype=torch.bfloat16)
    matrix = sent.view(eagle.HIDDEN_SIZE, -1).double()
    torch.testing.assert_close(matrix, tensors["fc.weight"].double(), rtol=1e-2, atol=1e-3)
    text = TEXTS[0]
    rows = _features(text, whole.features.width)
    given = [rows, (rows.double() @ tensors["fc.weight"].double().T)]
    found = []
    for head, features in zip((whole, projected), given, strict=True):
        head.bind(KVPools(12, PAGE_SIZE, head.dtype, CPU))
        row = DraftInput(RowSlice(text[1:], 0, PAGES[0], 1), 4, GREEDY, features=features)
        backend = choose_backend(None, head.attention_traits(), CPU)
        with torch.inference_mode():
            found.append(head.run([row], backend, PAGE_SIZE))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_block_drafts_are_the_best_products_of_the_slots(tmp_path: Path, target: Target) -> None:
    folder = eagle.save_head(tmp_path / "head", made.dflash_tensors(), made.DFLASH)
    head = load_dflash(folder, target.folder, torch.float64, CPU)
    backend = choose_backend(None, head.attention_traits(), CPU)
    with torch.inference_mode():
        head.bind(KVPools(20, PAGE_SIZE, head.dtype, CPU))
        outputs = head.run(_inputs(head, (6, 0, 0)), backend, PAGE_SIZE)
        assert outputs is not None
        log_probs = head.logits(outputs[0]).log_softmax(dim=-1)
    best = log_probs.argmax(dim=-1).tolist()
    ((chain, _, sure),) = _drafter(head, tree_width=1).drafts(_inputs(head, (6, 0, 0)))
    assert chain == best
    odds = [float(row.max().exp()) for row in log_probs]
    expected = [128 + 16 * torch.tensor(p / (1 - p)).log().item() for p in odds]
    assert list(sure) == [max(1, min(255, round(value))) for value in expected]
    ((tokens, parents, _),) = _drafter(head).drafts(_inputs(head, (9, 0, 0)))
    assert len(tokens) == 9
    scores: list[float] = []
    depths: list[int] = []
    with torch.inference_mode():
        outputs = head.run(_inputs(head, (9, 0, 0)), backend, PAGE_SIZE)
        assert outputs is not None
        log_probs = head.logits(outputs[0]).log_softmax(dim=-1)
    for token, parent in zip(tokens, parents, strict=True):
        depth = 0 if parent < 0 else depths[parent] + 1
        before = 0.0 if parent < 0 else scores[parent]
        depths.append(depth)
        scores.append(before + float(log_probs[depth, token]))
    assert scores == sorted(scores, reverse=True)


def test_dflash_that_does_not_fit_is_refused_by_name(tmp_path: Path, target: Target) -> None:
    tensors, config = made.dflash_tensors(), made.DFLASH
    group = config["dflash_config"]
    cases: list[tuple[dict[str, Tensor | None], Config, str]] = [
        ({"hidden_norm.weight": None}, {}, "no tensor hidden_norm.weight"),
        ({"fc.weight": torch.zeros(32, 64)}, {}, r"fc.weight .* \[32, 64\]; \[32, 96\]"),
        ({"layers.1.self_attn.k_norm.weight": None}, {}, "k_norm.weight"),
        ({"layers.3.mlp.up_proj.weight": torch.zeros(48, 32)}, {}, "layers.3.mlp.up_proj.weight"),
        ({"layers.0.attention_conv.base_kernel": torch.zeros(2)}, {}, "DFlash2 module"),
        ({"markov_head.markov_w1.weight": torch.zeros(2)}, {}, "DSpark module"),
        ({}, {"speculators_model_type": "eagle3"}, "a eagle3 module"),
        ({}, {"dflash_config": {**group, "mask_token_id": 97}}, "mask_token_id 97"),
        ({}, {"dflash_config": {**group, "mask_token_id": None}}, "mask_token_id"),
        ({}, {"dflash_config": {"mask_token_id": 3}}, "target_layer_ids"),
        ({}, {"dflash_config": {**group, "target_layer_ids": [1, 9]}}, "behind the last"),
        ({}, {"dflash_config": {**group, "target_layer_ids": [4, 1]}}, "must rise"),
        ({}, {"block_size": 1}, "block_size"),
        ({}, {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({}, {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ({}, {"target_hidden_size": 64}, "states of 64"),
    ]
    for i, (change, settings, message) in enumerate(cases):
        changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        folder = eagle.save_head(tmp_path / f"head{i}", changed, {**config, **settings})
        with pytest.raises(ConfigError, match=message):
            load_dflash(folder, target.folder, torch.float32, CPU)


@pytest.mark.parametrize(
    ("config", "states"),
    [
        (made.DFLASH, "2,5,9"),
        (made.SPECULATORS, "2,5,9"),
        ({"architectures": ["DFlashDraftModel"], "target_layer_ids": [-1, 3]}, "0,4"),
    ],
)
def test_states_of_dflash_are_those_that_config_json_names(
    tmp_path: Path, config: Config, states: str
) -> None:
    folder = eagle.save_head(tmp_path / "head", {}, config)
    assert drafting_method("head", folder) == "dflash"
    assert states_read("dflash", str(folder)) == states


def test_states_of_dflash_without_layers_are_refused(tmp_path: Path) -> None:
    folder = eagle.save_head(tmp_path / "head", {}, {"architectures": ["DFlashDraftModel"]})
    with pytest.raises(ConfigError, match=r"head names no layers .*target_layer_ids"):
        states_read("dflash", str(folder))


def _dspark_path(
    tensors: Mapping[str, Tensor], text: list[int], count: int, params: SamplingParams
) -> tuple[list[int], list[float], list[Tensor]]:
    """A DSpark chain by the formula, with its confidences and the logits it was drawn from."""
    t = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    block = torch.tensor([text[-1]] + [made.MASK_TOKEN] * (count - 1))
    hidden = reference.dflash(
        tensors,
        made.DFLASH,
        _features(text, len(made.LAYERS) * eagle.HIDDEN_SIZE),
        tensors["embed_tokens.weight"][block],
        causal=[False] * made.NUM_LAYERS,
        windows=[None] * made.NUM_LAYERS,
    )
    last, chain, sure, seen = text[-1], [], [], []
    state = torch.zeros(made.RANK, dtype=torch.float64)
    for slot in range(count):
        before = t["markov_head.markov_w1.weight"][last]
        both = torch.cat((hidden[slot], before))
        gated = before
        if "markov_head.gate_proj.weight" in t:
            gate = t["markov_head.gate_proj.weight"] @ both + t["markov_head.gate_proj.bias"]
            gated = torch.sigmoid(gate) * before
        if "markov_head.joint_proj.weight" in t:
            joint = t["markov_head.joint_proj.weight"] @ torch.cat((state, before, hidden[slot]))
            keep, new, out = (joint + t["markov_head.joint_proj.bias"]).view(3, -1)
            state = torch.sigmoid(keep) * state + (1 - torch.sigmoid(keep)) * torch.tanh(new)
            gated = torch.tanh(out)
        known = t["lm_head.weight"] @ hidden[slot] + t["markov_head.markov_w2.weight"] @ gated
        logits = known
        if "d2t" in t:
            logits = torch.full((eagle.VOCAB_SIZE,), -torch.inf, dtype=torch.float64)
            logits[t["d2t"] + torch.arange(len(t["d2t"]))] = known
        draw = SamplingBatch.build([params], [len(text) + slot], CPU)
        last = int(sample(logits[None].float(), draw)[0])
        odds = t["confidence_head.proj.weight"][0] @ both + t["confidence_head.proj.bias"][0]
        chain.append(last)
        sure.append(float(odds))
        seen.append(logits)
    return chain, sure, seen


@pytest.mark.parametrize("draft_vocab", [None, 40])
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # some are fused in float32
def test_dspark_draws_left_to_right_as_the_formula_says(
    tmp_path: Path,
    target: Target,
    draft_vocab: int | None,
    markov: str,
    temperature: float,
    dtype: torch.dtype,
) -> None:
    tensors = made.dspark_tensors(draft_vocab=draft_vocab, markov=markov)
    config = {**made.DSPARK, "markov_head_type": markov}
    folder = eagle.save_head(tmp_path / "head", tensors, config)
    assert states_read("dspark", str(folder)) == "2,5,9"
    head = load_dspark(folder, target.folder, dtype, CPU)
    assert head.max_depth == made.BLOCK_SIZE
    params = SamplingParams(temperature=temperature, seed=8)
    rows = [row._replace(sampling=params) for row in _inputs(head, (7, 4, 1))]
    chains = _drafter(head, tree_width=1).drafts(rows)
    trees = _drafter(head, tree_width=3).drafts(rows)
    for text, row, (chain, _, told), (tokens, parents, _) in zip(
        TEXTS, rows, chains, trees, strict=True
    ):
        expected, odds, seen = _dspark_path(tensors, text, row.wanted, params)
        assert chain == expected
        assert list(told) == [max(1, min(255, round(128 + 16 * each))) for each in odds]
        assert len(tokens) == row.wanted
        assert tokens[0] == expected[0]  # the likeliest node
        if temperature == 0.0:
            assert parents[0] == -1
            top = seen[0].topk(3).indices.tolist()
            assert {t for t, p in zip(tokens, parents, strict=True) if p == -1} <= set(top)


@pytest.mark.parametrize("draft_vocab", [None, 40])
@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
@pytest.mark.parametrize(
    ("dtype", "rounded"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        pytest.param(torch.float32, True, marks=int8_only),
    ],
)
def test_fused_chains_of_dspark_are_those_of_its_steps(
    tmp_path: Path,
    target: Target,
    draft_vocab: int | None,
    markov: str,
    dtype: torch.dtype,
    rounded: bool,
) -> None:
    """With cuts, and rows of several parameters at once."""
    tensors = made.dspark_tensors(draft_vocab=draft_vocab, markov=markov)
    config = {**made.DSPARK, "markov_head_type": markov}
    folder = eagle.save_head(tmp_path / "head", tensors, config)
    head = load_dspark(folder, target.folder, dtype, CPU)
    NumbaOps(dtype, int8=rounded).tune(head.uses)
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=2, top_k=5),
        SamplingParams(temperature=1.3, seed=3, top_p=0.7, min_p=0.02),
    )
    pairs = zip(_inputs(head, (7, 7, 7)), params, strict=True)
    rows = [row._replace(sampling=each) for row, each in pairs]
    drafter = _drafter(head, tree_width=1)
    assert head._chains is not None
    fused = [guess.tokens for guess in drafter.drafts(rows)]
    head._chains = None
    stepped = [guess.tokens for guess in drafter.drafts(rows)]
    if dtype is torch.float32:
        assert fused == stepped
    else:  # a sum is rounded in one of them
        assert [chain[:1] for chain in fused] == [chain[:1] for chain in stepped]


def test_fused_chains_of_dspark_forget_their_path_where_a_gate_is_shut(
    tmp_path: Path, target: Target
) -> None:
    tensors = made.dspark_tensors(markov="rnn")
    tensors["markov_head.joint_proj.bias"][: made.RANK] = -150.0  # e^150 is beyond float32
    config = {**made.DSPARK, "markov_head_type": "rnn"}
    folder = eagle.save_head(tmp_path / "head", tensors, config)
    head = load_dspark(folder, target.folder, torch.float32, CPU)
    rows = _inputs(head, (7, 7, 7))
    drafter = _drafter(head, tree_width=1)
    assert head._chains is not None
    fused = [guess.tokens for guess in drafter.drafts(rows)]
    head._chains = None
    assert fused == [guess.tokens for guess in drafter.drafts(rows)]


def test_dspark_without_markov_head_and_confidence_is_dflash_from_the_anchor(
    tmp_path: Path, target: Target
) -> None:
    tensors = made.dflash_tensors()
    config = {**made.DSPARK, "markov_rank": 0, "enable_confidence_head": False}
    folder = eagle.save_head(tmp_path / "head", tensors, config)
    head = load_dspark(folder, target.folder, torch.float64, CPU)
    _check(head, tensors, target, Slots(from_anchor=True))
    ((chain, _, told),) = _drafter(head, tree_width=1).drafts(_inputs(head, (5, 0, 0)))
    assert len(chain) == len(told) == 5


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_peagle_equals_the_formula(
    tmp_path: Path, target: Target, draft_vocab: int | None, project: bool
) -> None:
    tensors = made.peagle_tensors(draft_vocab=draft_vocab)
    folder = eagle.save_head(tmp_path / "head", tensors, made.PEAGLE)
    assert drafting_method("head", folder) == "peagle"
    assert states_read("peagle", str(folder)) == "2,4,6"
    head = load_peagle(folder, target.folder, torch.float64, CPU, project=project)
    assert head.max_depth == 6
    head.bind(KVPools(12, PAGE_SIZE, head.dtype, CPU))
    fc = tensors["fc.weight"].double()
    whole = [eagle.features(len(text) - 1, 96, seed=len(text)).double() for text in TEXTS]
    wanted = (6, 3, 0)
    rows = []
    for text, features, pages, count in zip(TEXTS, whole, PAGES, wanted, strict=True):
        given = features @ fc.T if project else features
        rows.append(DraftInput(RowSlice(text[1:], 0, pages, 1), count, GREEDY, features=given))
    backend = choose_backend(None, head.attention_traits(), CPU)
    with torch.inference_mode():
        outputs = head.run(rows, backend, PAGE_SIZE)
        assert outputs is not None
        assert outputs.shape[:2] == (2, 6)
    run = eagle3_formula(
        tensors,
        tensors["embed_tokens.weight"],
        tensors["lm_head.weight"],
        {**eagle.LLAMA, "num_hidden_layers": 2},
        layer="layers.0.",
    )
    mask = (tensors["mask_hidden"][0].double() @ fc.T).expand(5, -1)
    for text, features, count, found in zip(TEXTS, whole, wanted, outputs, strict=False):
        tokens = torch.tensor(text[1:] + [made.MASK_TOKEN] * (count - 1))
        states = torch.cat((features @ fc.T, mask[: count - 1]))
        expected = torch.stack([logits for logits, _ in run(tokens, states)[-count:]])
        with torch.inference_mode():
            logits = head.logits(found[:count]).double()
        if draft_vocab:
            logits = logits[:, tensors["d2t"] + torch.arange(draft_vocab)]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_block_modules_of_another_kind_are_refused_by_name(tmp_path: Path, target: Target) -> None:
    stores: dict[str, tuple[eagle.Tensors, Config]] = {
        "dflash": (made.dflash_tensors(), made.DFLASH),
        "dspark": (made.dspark_tensors(), made.DSPARK),
        "peagle": (made.peagle_tensors(), made.PEAGLE),
    }
    names = {"dflash": "DFlash", "dspark": "DSpark", "peagle": "peagle"}
    loaders: dict[str, Any] = {"dflash": load_dflash, "dspark": load_dspark, "peagle": load_peagle}
    for kind, (tensors, config) in stores.items():
        folder = eagle.save_head(tmp_path / kind, tensors, config)
        for method, load in loaders.items():
            if method == kind:
                load(folder, target.folder, torch.float32, CPU)
            elif method != "peagle":
                with pytest.raises(ConfigError, match=f"holds a {names[kind]} module"):
                    load(folder, target.folder, torch.float32, CPU)
            else:
                with pytest.raises(ConfigError, match="not an P-EAGLE module"):
                    load(folder, target.folder, torch.float32, CPU)
    cases: list[tuple[str, dict[str, Tensor | None], Config, str]] = [
        ("dspark", {}, {"markov_head_type": "lstm"}, "markov_head_type 'lstm'"),
        ("dspark", {"markov_head.markov_w2.weight": torch.zeros(3, 6)}, {}, r"\[3, 6\]; \[97, 6\]"),
        ("dspark", {"confidence_head.proj.weight": torch.zeros(1, 5)}, {}, r"\[1, 5\]; \[1, 38\]"),
        ("dspark", {"confidence_head.other": torch.zeros(1)}, {}, "confidence_head.other"),
        ("peagle", {"mask_hidden": torch.zeros(1, 1, 64)}, {}, "mask_hidden .* has 64 values; 96"),
        ("peagle", {"mask_hidden": None}, {}, "no tensor mask_hidden"),
        ("peagle", {}, {"mask_token_id": None}, "mask_token_id None"),
        ("peagle", {}, {"para_depths": 0}, "0 tokens at once"),
    ]
    for i, (kind, change, settings, message) in enumerate(cases):
        tensors, config = stores[kind]
        changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        folder = eagle.save_head(tmp_path / f"case{i}", changed, {**config, **settings})
        with pytest.raises(ConfigError, match=message):
            loaders[kind](folder, target.folder, torch.float32, CPU)


def test_dflash_with_padded_blocks_computes_the_same(tmp_path: Path, target: Target) -> None:
    """As on a GPU, where every round feeds whole blocks."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = {**made.DFLASH, "layer_types": kinds, "sliding_window": 8}
    folder = eagle.save_head(tmp_path / "head", made.dflash_tensors(), config)
    found = []
    for pads in (False, True):
        head = load_dflash(folder, target.folder, torch.float64, CPU)
        head.pads = pads
        assert head.num_fed(2) == (made.BLOCK_SIZE if pads else 3)
        found.append(_outputs(head, (2, 1, 1)))
    for i, count in enumerate((2, 1, 1)):
        torch.testing.assert_close(found[0][i, :count], found[1][i, :count], rtol=1e-9, atol=1e-9)


@int8_only
def test_dspark_alone_computes_what_it_does_beside_others() -> None:
    """Alone it repeats recorded kernels, through the first pages and past them."""
    folder, embedded = resolve_module("embedded", "dspark", "embedded")
    pages = list(range(1, 21))

    def run(starts: Sequence[tuple[int, int]], *, alone: bool) -> list[Tensor]:
        head = load_dspark(folder, embedded, torch.bfloat16, CPU)
        NumbaOps(torch.bfloat16, int8=True).tune(head.uses)
        head.bind(KVPools(42, 16, head.dtype, CPU))
        backend = choose_backend(None, head.attention_traits(), CPU)
        recorded = RecordedBlocks.of(head, backend, 16)
        assert recorded is not None
        found = []
        for seed, (start, count) in enumerate(starts):
            states = eagle.features(count, head.features.width, seed=seed).bfloat16()
            text = [7 + seed + i for i in range(count)]
            row = DraftInput(RowSlice(text, start, pages, 1), 7, GREEDY, features=states)
            other = row._replace(slice=row.slice._replace(block_table=[p + 20 for p in pages]))
            rows = [row] if alone else [row, other]
            outputs = recorded.run(rows)
            few = count <= head.num_slots(head.max_depth) + 1
            assert (outputs is not None) == (alone and few)
            if outputs is None:
                with torch.inference_mode():
                    outputs = head.run(rows, backend, 16)
            assert outputs is not None
            found.append(outputs[0].clone())
        return found

    starts = [(0, 12), (12, 1), (13, 8), (21, 240), (261, 3), (264, 17), (281, 3)]
    for first, second in zip(run(starts, alone=True), run(starts, alone=False), strict=True):
        assert torch.equal(first, second)
