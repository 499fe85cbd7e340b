"""EAGLE and EAGLE-3 modules, read from files as they are published, against their formulas."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig

from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.checkpoints import TargetTensors
from outrider.drafting.hidden_states.forward import HeadForward
from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.drafting.hidden_states.heads.eagle3 import Eagle3Head
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.engine.batch import RowSlice, pack
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from outrider.errors import ConfigError
from outrider.models.modules import shared_files
from outrider.params import SamplingParams
from tests.support.checkpoints import eagle_checkpoints as made
from tests.support.checkpoints import eagle_reference as reference
from tests.support.checkpoints.loading import load_eagle, load_eagle3

CPU = torch.device("cpu")
TOKENS = [5, 90, 17, 3, 88, 41, 2, 60, 33]
NUM_STEPS = 4
PAGE_SIZE = 4
LAYERS = (2, 4, 6)  # of a target of 9

Config = dict[str, Any]


@dataclass(frozen=True)
class Target:
    folder: Path
    embedding: Tensor
    head: Tensor


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return _target(tmp_path / "target")


def _target(folder: Path, **settings: Any) -> Target:
    tensors = load_file(made.save_target(folder, **settings) / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    return Target(folder, embedding, tensors.get("lm_head.weight", embedding))


def _drafted(head: RecurrentHead, rows: Tensor, num_steps: int) -> tuple[list[int], list[Tensor]]:
    """A greedy draft after `TOKENS`, and the logits of its steps [vocab]."""
    pools = KVPools(8, PAGE_SIZE, head.dtype, CPU)
    head.bind(pools)
    backend = choose_backend(None, head.attention_traits(), CPU)
    table = [6, 1, 4, 0]  # pages in no order
    drafted: list[int] = []
    logits: list[Tensor] = []
    with torch.inference_mode():
        forward = HeadForward(head, backend, PAGE_SIZE, rows)
        feed, start = TOKENS[1:], 0
        for _ in range(num_steps):
            batch = pack([RowSlice(feed, start, table, 1)], PAGE_SIZE, CPU)
            logits.append(forward.forward(batch)[0].clone())
            drafted.append(int(logits[-1].argmax()))
            start += len(feed)
            feed = drafted[-1:]
    return drafted, logits


def _check(
    head: RecurrentHead,
    run: reference.Module,
    begin: Callable[[Tensor], Tensor],
    target_ids: Tensor | None = None,
) -> None:
    """A draft and its logits are what the formula says, from true states that `begin` makes."""
    rows = made.features(len(TOKENS) - 1, head.features.captured_width)
    expected, seen = reference.draft(run, TOKENS, begin(rows.double()), NUM_STEPS, target_ids)
    drafted, logits = _drafted(head, rows, NUM_STEPS)
    assert drafted == expected
    for found, wanted in zip(logits, seen, strict=True):
        if target_ids is not None:
            unknown = torch.ones(made.VOCAB_SIZE, dtype=torch.bool).index_fill(0, target_ids, False)
            assert bool((found[unknown] == -torch.inf).all())
            found = found[target_ids]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("write", [made.save_bin, made.save_safetensors])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle_in_every_file_format_equals_the_formula(
    tmp_path: Path, target: Target, bias: bool, write: made.Write
) -> None:
    tensors = made.eagle_tensors(bias=bias)
    folder = made.save_head(tmp_path / "head", tensors, made.LLAMA, write)
    head = load_eagle(folder, target.folder, torch.float64, CPU)
    assert head.features.states == ("final",)
    run = reference.eagle(tensors, target.embedding, target.head, made.LLAMA)
    _check(head, run, lambda rows: rows)


def test_eagle_with_two_layers_and_tied_target_equals_the_formula(
    tmp_path: Path,
) -> None:
    target = _target(tmp_path / "target", tied=True)
    config = {**made.LLAMA, "num_hidden_layers": 2, "rope_theta": 300.0}
    tensors = made.eagle_tensors(num_layers=2)
    folder = made.save_head(tmp_path / "head", tensors, config)
    head = load_eagle(folder, target.folder, torch.float64, CPU)
    _check(head, reference.eagle(tensors, target.embedding, target.head, config), lambda rows: rows)


def test_eagle_with_unfitting_tensors_is_refused(tmp_path: Path, target: Target) -> None:
    tensors = made.eagle_tensors()
    for change, message in (
        ({"fc.weight": None}, "no tensor fc.weight"),
        ({"fc.weight": torch.zeros(32, 96)}, r"fc.weight .* of shape \[32, 96\]; \[32, 64\]"),
        ({"layers.0.mlp.up_proj.weight": None}, "no tensor layers.0.mlp.up_proj.weight"),
        ({"layers.0.input_layernorm.weight": torch.ones(32)}, "layers.0.input_layernorm.weight"),
    ):
        _refused(tmp_path, tensors, change, made.LLAMA, message, load_eagle, target)
    _refused(
        tmp_path, tensors, {}, {**made.LLAMA, "hidden_size": 64}, "states of 64", load_eagle, target
    )
    _refused(
        tmp_path, tensors, {}, {**made.LLAMA, "hidden_act": "gelu"}, "gelu", load_eagle, target
    )


def _refused(
    folder: Path,
    tensors: Mapping[str, Tensor],
    change: Mapping[str, Tensor | None],
    config: Config,
    message: str,
    load: Callable[[Path, Path, torch.dtype, torch.device], RecurrentHead],
    target: Target,
) -> None:
    changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
    where = folder / f"refused{len(list(folder.iterdir()))}"
    made.save_head(where, changed, config)
    with pytest.raises(ConfigError, match=message):
        load(where, target.folder, torch.float32, CPU)


def _fc(tensors: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda rows: rows @ tensors["fc.weight"].double().T


def _target_ids(tensors: Mapping[str, Tensor]) -> Tensor:
    return tensors["d2t"] + torch.arange(len(tensors["d2t"]))


@pytest.mark.parametrize("root", ["", "model."])
def test_eagle3_as_published_equals_the_formula(tmp_path: Path, target: Target, root: str) -> None:
    tensors = made.eagle3_tensors()
    ends = ("lm_head.weight", "d2t", "t2d")
    stored = {name if name in ends else root + name: t for name, t in tensors.items()}
    folder = made.save_head(tmp_path / "head", stored, {**made.LLAMA, "draft_vocab_size": 40})
    head = load_eagle3(folder, target.folder, torch.float64, CPU)
    assert head.features.layers == LAYERS  # 2, N / 2, N - 3
    run = reference.eagle3(tensors, target.embedding, tensors["lm_head.weight"], made.LLAMA)
    _check(head, run, _fc(tensors), _target_ids(tensors))


def test_eagle3_with_the_targets_head_equals_the_formula(tmp_path: Path, target: Target) -> None:
    tensors = made.eagle3_tensors(draft_vocab=None)
    del tensors["lm_head.weight"]
    folder = made.save_head(tmp_path / "head", tensors, made.LLAMA)
    head = load_eagle3(folder, target.folder, torch.float64, CPU)
    _check(
        head,
        reference.eagle3(tensors, target.embedding, target.head, made.LLAMA),
        _fc(tensors),
    )


def test_eagle3_narrower_than_its_target_equals_the_formula(tmp_path: Path) -> None:
    target = _target(tmp_path / "target", hidden_size=48)
    tensors = made.eagle3_tensors(target_hidden=48, embedding=True)
    config = {**made.LLAMA, "target_hidden_size": 48}
    folder = made.save_head(tmp_path / "head", tensors, config)
    head = load_eagle3(folder, target.folder, torch.float64, CPU)
    run = reference.eagle3(
        tensors, tensors["embed_tokens.weight"], tensors["lm_head.weight"], config
    )
    _check(head, run, _fc(tensors), _target_ids(tensors))
    del tensors["embed_tokens.weight"]
    _refused(tmp_path, tensors, {}, config, "no tensor embed_tokens.weight", load_eagle3, target)


def _speculators(**settings: Any) -> Config:
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": made.LLAMA,
        "draft_vocab_size": 40,
        **settings,
    }


@pytest.mark.parametrize("norm_before_residual", [True, False])
@pytest.mark.parametrize("norm_output", [True, False])
def test_eagle3_of_speculators_equals_the_formula(
    tmp_path: Path, target: Target, norm_before_residual: bool, norm_output: bool
) -> None:
    flags = {"norm_before_residual": norm_before_residual, "norm_output": norm_output}
    layer_config = {**made.LLAMA, "num_hidden_layers": 2}
    tensors = made.eagle3_tensors(layer="layers.0.", num_layers=2, embedding=True)
    config = _speculators(
        transformer_layer_config=layer_config, eagle_aux_hidden_state_layer_ids=[1, 5, 9], **flags
    )
    folder = made.save_head(tmp_path / "head", tensors, config, made.save_safetensors)
    head = load_eagle3(folder, target.folder, torch.float64, CPU)
    assert head.features.layers == (1, 5, 9)  # inputs, and what leaves the last layer
    run = reference.eagle3(
        tensors,
        tensors["embed_tokens.weight"],
        tensors["lm_head.weight"],
        layer_config,
        layer="layers.0.",
        **flags,
    )
    _check(head, run, _fc(tensors), _target_ids(tensors))


@pytest.mark.parametrize("said", [True, None])
def test_eagle3_with_norms_before_fc_equals_the_formula(
    tmp_path: Path, target: Target, said: bool | None
) -> None:
    """Of all states together, or of each; said in config.json, or seen from the tensors."""
    tensors = made.eagle3_tensors(layer="layers.0.", embedding=True)
    run = reference.eagle3(
        tensors,
        tensors["embed_tokens.weight"],
        tensors["lm_head.weight"],
        made.LLAMA,
        layer="layers.0.",
    )
    eps, size = made.LLAMA["rms_norm_eps"], made.HIDDEN_SIZE
    whole = 1 + 0.2 * torch.randn(3 * size)
    parts = {f"fc_norm.{i}.weight": 1 + 0.2 * torch.randn(size) for i in range(3)}

    def of_whole(rows: Tensor) -> Tensor:
        return _fc(tensors)(reference.rms(rows, whole.double(), eps))

    def of_parts(rows: Tensor) -> Tensor:
        pairs = zip(rows.split(size, dim=-1), parts.values(), strict=True)
        normed = [reference.rms(state, norm.double(), eps) for state, norm in pairs]
        return _fc(tensors)(torch.cat(normed, dim=-1))

    for key, norms, begin in (
        ("norm_before_fc", {"input_norm.weight": whole}, of_whole),
        ("fc_norm", parts, of_parts),
    ):
        config = _speculators() if said is None else _speculators(**{key: said})
        folder = made.save_head(tmp_path / key, {**tensors, **norms}, config)
        head = load_eagle3(folder, target.folder, torch.float64, CPU, project=True)
        assert not head.projection  # the scorer knows no norms
        _check(head, run, begin, _target_ids(tensors))


def test_eagle3_when_projected_by_the_scorer_equals_the_formula(
    tmp_path: Path, target: Target
) -> None:
    tensors = made.eagle3_tensors()
    tensors["fc.weight"] = tensors["fc.weight"].bfloat16().float()  # as it crosses the wire
    folder = made.save_head(tmp_path / "head", tensors, made.LLAMA)
    head = load_eagle3(folder, target.folder, torch.float64, CPU, project=True)
    spec = head.features
    assert spec.width == spec.projection_dim == made.HIDDEN_SIZE
    assert spec.captured_width == 3 * made.HIDDEN_SIZE
    assert spec.projection_sha256 == hashlib.sha256(head.projection).digest()
    matrix = torch.frombuffer(bytearray(head.projection), dtype=torch.bfloat16)
    assert torch.equal(matrix.view(spec.projection_dim, -1).float(), tensors["fc.weight"])
    rows = made.features(len(TOKENS) - 1, spec.captured_width)
    sent = (rows.double() @ matrix.view(spec.projection_dim, -1).double().T).bfloat16()
    run = reference.eagle3(tensors, target.embedding, tensors["lm_head.weight"], made.LLAMA)
    ids = _target_ids(tensors)
    expected, seen = reference.draft(run, TOKENS, sent.double(), NUM_STEPS, ids)
    drafted, logits = _drafted(head, sent, NUM_STEPS)
    assert drafted == expected
    torch.testing.assert_close(logits[-1][ids], seen[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 4, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, (2, 4, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 6, 9]}, (3, 6, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (0, 3, 7)),
    ],
)
def test_eagle3_aux_layers_are_numbered_by_inputs_or_outputs(
    tmp_path: Path, target: Target, config: Config, layers: tuple[int, ...]
) -> None:
    folder = made.save_head(tmp_path / "head", made.eagle3_tensors(), {**made.LLAMA, **config})
    assert load_eagle3(folder, target.folder, torch.float32, CPU).features.layers == layers


def test_eagle3_with_absolute_draft_ids_equals_the_formula(tmp_path: Path, target: Target) -> None:
    tensors = made.eagle3_tensors()
    ids = _target_ids(tensors)
    folder = made.save_head(tmp_path / "head", {**tensors, "d2t": ids}, made.LLAMA)
    head = load_eagle3(folder, target.folder, torch.float64, CPU)
    run = reference.eagle3(tensors, target.embedding, tensors["lm_head.weight"], made.LLAMA)
    _check(head, run, _fc(tensors), ids)


def test_eagle3_with_unfitting_tensors_is_refused(tmp_path: Path, target: Target) -> None:
    tensors = made.eagle3_tensors()
    twice = tensors["d2t"].clone()
    twice[1] = twice[0] - 1
    unnamed = tensors["t2d"].roll(1)
    aux = "eagle_aux_hidden_state_layer_ids"
    for change, settings, message in (
        ({"fc.weight": None}, {}, "no tensor fc.weight"),
        ({"fc.weight": torch.zeros(32, 64)}, {}, r"fc.weight .* of shape \[32, 64\]"),
        ({"midlayer.hidden_norm.weight": None}, {}, "no tensor midlayer.hidden_norm.weight"),
        ({"d2t": None}, {}, "no tensor d2t"),
        ({"d2t": torch.zeros(41, dtype=torch.int64)}, {}, r"d2t .* of shape \[41\]"),
        ({"d2t": twice}, {}, "d2t"),
        ({"t2d": unnamed}, {}, "t2d"),
        ({"lm_head.weight": torch.zeros(40, 16)}, {}, "lm_head.weight"),
        ({"lm_head.weight": torch.zeros(40)}, {}, r"lm_head.weight .* of shape \[40\]"),
        ({"norm.weight": torch.ones(32).char()}, {}, "norm.weight .* as torch.int8"),
        ({"midlayer.extra.weight": torch.zeros(2)}, {}, "midlayer.extra.weight"),
        ({"embed_tokens.weight": torch.zeros(90, 32)}, {}, "embed_tokens.weight"),
        ({}, {aux: [2, 4, 10]}, aux),
        ({}, {aux: [4, 2, 6]}, aux),
        ({}, {aux: "2,4,6"}, aux),
        ({}, {aux: [2, 4]}, r"fc.weight .* \[32, 64\] follows"),
        ({}, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({}, {"target_hidden_size": 64}, "states of 64"),
        ({}, {"eagle_config": [2, 4, 6]}, "eagle_config"),
        ({}, {"transformer_layer_config": "llama"}, "transformer_layer_config"),
        ({}, {"num_hidden_layers": "one"}, "num_hidden_layers"),
        ({}, {"max_position_embeddings": -1}, "-1 positions"),
        ({}, {"norm_before_fc": True}, "no tensor input_norm.weight"),
        ({}, {"speculators_model_type": "mlp"}, "'mlp', not an EAGLE-3"),
        ({}, {"rope_scaling": {"rope_type": "longrope"}}, "longrope|rope"),
    ):
        config = {**made.LLAMA, **settings}
        _refused(tmp_path, tensors, change, config, message, load_eagle3, target)


def test_checkpoint_of_broken_files_is_refused(tmp_path: Path, target: Target) -> None:
    folder = made.save_head(tmp_path / "head", made.eagle3_tensors(), made.LLAMA)
    for content in (b"not a checkpoint", b"", b"\x80"):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ConfigError, match=r"cannot be read: pytorch_model\.bin"):
            load_eagle3(folder, target.folder, torch.float32, CPU)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        load_eagle3(folder, target.folder, torch.float32, CPU)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_eagle3(folder, target.folder, torch.float32, CPU)


def test_checkpoint_with_null_groups_is_read(tmp_path: Path, target: Target) -> None:
    path = target.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_config": None}))
    nothing = dict.fromkeys(("transformer_layer_config", "eagle_config", "text_config"))
    tensors = made.eagle3_tensors()
    folder = made.save_head(tmp_path / "head", tensors, {**made.LLAMA, **nothing})
    assert load_eagle3(folder, target.folder, torch.float32, CPU).features.layers == (2, 4, 6)
    path.write_text(json.dumps({"text_config": "llama"}))
    with pytest.raises(ConfigError, match="text_config must be a group"):
        load_eagle3(folder, target.folder, torch.float32, CPU)


def test_target_tensors_without_a_setting_take_the_kinds_default(tmp_path: Path) -> None:
    # As Gemma 3's makers publish it: without vocab_size.
    text = {"model_type": "gemma3_text", "hidden_size": 8, "num_hidden_layers": 9}
    config = {"model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = Gemma3TextConfig().vocab_size
    embedding = torch.arange(8 * size).view(size, 8).bfloat16()
    name = "language_model.model.embed_tokens.weight"
    save_file({name: embedding}, tmp_path / "model.safetensors")
    shared = TargetTensors(tmp_path)
    assert (shared.vocab_size, shared.hidden_size, shared.num_layers) == (size, 8, 9)
    assert torch.equal(shared.head(), embedding), "tied"
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    with pytest.raises(ConfigError, match="cannot be read"):  # whose default?
        TargetTensors(tmp_path)


def test_shared_files_of_a_sharded_target_are_only_those_needed(
    tmp_path: Path, target: Target
) -> None:
    assert shared_files(target.folder) == ("*.safetensors",)
    parts = {
        "model.embed_tokens.weight": "model-1-of-3.safetensors",
        "model.layers.0.mlp.up_proj.weight": "model-2-of-3.safetensors",
        "lm_head.weight": "model-3-of-3.safetensors",
    }
    whole = load_file(target.folder / "model.safetensors")
    (target.folder / "model.safetensors").unlink()
    index = target.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    needed = {"model-1-of-3.safetensors", "model-3-of-3.safetensors"}
    assert set(shared_files(target.folder)) == needed
    for name, part in parts.items():
        if part in needed:
            save_file({name: whole[name]}, target.folder / part)
    tensors = made.eagle_tensors()
    folder = made.save_head(tmp_path / "head", tensors, made.LLAMA)
    head = load_eagle(folder, target.folder, torch.float64, CPU)
    run = reference.eagle(tensors, target.embedding, target.head, made.LLAMA)
    _check(head, run, lambda rows: rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eagle3_in_other_precisions_is_close(
    tmp_path: Path, target: Target, dtype: torch.dtype
) -> None:
    folder = made.save_head(tmp_path / "head", made.eagle3_tensors(), made.LLAMA)

    def logits(of: torch.dtype) -> Tensor:
        head = load_eagle3(folder, target.folder, of, CPU)
        assert isinstance(head, Eagle3Head)
        rows = made.features(len(TOKENS) - 1, head.features.width)
        return _drafted(head, rows, 1)[1][0].double()

    found, exact = logits(dtype), logits(torch.float64)
    known = exact > -torch.inf
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    assert float((found[known] - exact[known]).norm() / exact[known].norm()) < tolerance


@pytest.mark.parametrize("num_nodes", [1, 5, 12])
def test_eagle3_tree_of_any_width_has_the_likeliest_nodes(
    tmp_path: Path, target: Target, num_nodes: int
) -> None:
    """Of all that there are: found by the formula, best first, each path computed by itself."""
    tensors = made.eagle3_tensors()
    tensors["lm_head.weight"] *= 6  # sure enough for trees of some depth
    folder = made.save_head(tmp_path / "head", tensors, made.LLAMA)
    head = load_eagle3(folder, target.folder, torch.float64, CPU)
    run = reference.eagle3(tensors, target.embedding, tensors["lm_head.weight"], made.LLAMA)
    ids = _target_ids(tensors)
    rows = made.features(len(TOKENS) - 1, head.features.width)
    nodes: list[tuple[float, tuple[int, ...]]] = []  # scores and paths
    found: list[tuple[int, ...]] = []

    def expand(score: float, path: tuple[int, ...]) -> None:
        states = _fc(tensors)(rows.double())
        for end in range(len(path) + 1):
            tokens = torch.tensor([*TOKENS[1:], *path[:end]])
            logits, state = run(tokens, states)[-1]
            states = torch.cat((states, state[None]))
        for token, gain in zip(ids.tolist(), logits.log_softmax(-1).tolist(), strict=True):
            nodes.append((score + gain, (*path, token)))

    expand(0.0, ())
    while len(found) < num_nodes:
        best = max(nodes)
        nodes.remove(best)
        found.append(best[1])
        expand(best[0], best[1])
    drafter = RecurrentDrafter(
        head,
        KVPools(32, PAGE_SIZE, head.dtype, CPU),
        choose_backend(None, head.attention_traits(), CPU),
        ProposerLimits(tree_width=12),
    )
    proposer = CachedHeadProposer(drafter, method="eagle3", name="tiny")
    proposer.open(1, SessionStart(TOKENS, SamplingParams(temperature=0.0), num_nodes, 100))
    proposer.features(1, 0, made.as_bytes(rows))
    ((_, tree),) = proposer.draft([1]).drafts
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert paths == found


@pytest.mark.parametrize(
    ("own", "flag", "longest"), [(64, None, 128), (64, 90, 90), (256, None, 256)]
)
def test_eagle3_drafts_at_all_positions_of_its_target(
    tmp_path: Path, target: Target, own: int, flag: int | None, longest: int
) -> None:
    config = {**made.LLAMA, "max_position_embeddings": own}
    folder = made.save_head(tmp_path / "head", made.eagle3_tensors(), config)
    head = load_eagle3(folder, target.folder, torch.float64, CPU, max_model_len=flag)
    assert head.max_model_len == longest
