"""Multi-token prediction heads against the formulas of their formats, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.drafting.hidden_states.heads.mtp import MtpHead
from outrider.engine.batch import RowSlice, pack
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.quantized import QuantizedWeight
from outrider.engine.model.attention_backends import choose_backend
from outrider.errors import ConfigError
from tests.support.checkpoints import mtp_reference as reference
from tests.support.checkpoints.loading import load_mtp
from tests.support.checkpoints.mtp_checkpoints import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    MtpCheckpoint,
    deepseek,
    glm4_moe,
    qwen,
    rtp_qwen2,
    to_block_fp8,
)

CPU = torch.device("cpu")
PAGE_SIZE = 4

FORMATS: dict[str, tuple[Callable[[], MtpCheckpoint], Callable[[MtpCheckpoint], object]]] = {
    "deepseek in its target": (deepseek, reference.deepseek),
    "deepseek nextn": (lambda: deepseek(in_target=False), reference.deepseek),
    "deepseek fp8": (lambda: to_block_fp8(deepseek(), 16), reference.deepseek),
    "two deepseek modules": (lambda: deepseek(num_modules=2), reference.deepseek),
    "glm4_moe": (glm4_moe, reference.deepseek),
    "qwen3_next": (lambda: qwen("qwen3_next", fused_experts=False), reference.qwen),
    "qwen3_next fp8": (
        lambda: to_block_fp8(qwen("qwen3_next", fused_experts=False), 16),
        reference.qwen,
    ),
    "qwen3_5_moe": (lambda: qwen("qwen3_5_moe"), reference.qwen),
    "qwen3_5 dense": (lambda: qwen("qwen3_5"), reference.qwen),
    "qwen3_5 tied": (lambda: qwen("qwen3_5", tied=True), reference.qwen),
    "rtp": (rtp_qwen2, reference.rtp_qwen2),
    "two rtp modules": (lambda: rtp_qwen2(num_modules=2), reference.rtp_qwen2),
    "rtp with its own vocabulary": (
        lambda: rtp_qwen2(draft_ids=list(range(90, 10, -2))),
        reference.rtp_qwen2,
    ),
}


def load(checkpoint: MtpCheckpoint, folder: Path) -> MtpHead:
    return load_mtp(*checkpoint.write(folder), torch.float32, CPU)


class Runner:
    """Feeds one sequence's rows to a head."""

    def __init__(self, head: MtpHead) -> None:
        self.head = head
        self.pools = KVPools(8, PAGE_SIZE, head.dtype, CPU)
        self.backend = choose_backend(None, head.attention_traits(), CPU)
        head.bind(self.pools)

    def feed(
        self,
        tokens: list[int],
        states: Tensor,
        start: int,
        step: int,
        parents: tuple[int, ...] = (),
        num_logits: int | None = None,
    ) -> Tensor:
        rows = [RowSlice(tokens, start, [5, 1, 7, 2], num_logits or len(tokens), parents)]
        batch = pack(rows, PAGE_SIZE, CPU)
        return self.head.forward(batch.input_ids, states, self.backend(batch), step)


def made_up(length: int, seed: int = 0) -> tuple[list[int], Tensor]:
    """Tokens at 1, 2, ... and a target's states at 0, 1, ...: bfloat16 [length, H]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
    states = torch.randn(length, HIDDEN_SIZE, generator=generator)
    return tokens, states.to(torch.bfloat16)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", FORMATS)
@pytest.mark.parametrize("raw", [False, True])
def test_mtp_logits_of_every_format_equal_the_formula(case: str, raw: bool, tmp_path: Path) -> None:
    make, as_reference = FORMATS[case]
    checkpoint = make()
    if raw:
        checkpoint.config["feed_back"] = "raw"
    expected = as_reference(checkpoint)
    assert isinstance(expected, reference.Reference)
    head = load(checkpoint, tmp_path)
    assert head.vocab_size == VOCAB_SIZE
    assert head.features.final_norm
    assert head.features.width == HIDDEN_SIZE
    tokens, features = made_up(9)
    runner = Runner(head)

    first = runner.feed(tokens[:5], head.begin(features[:5]), 0, step=0)  # in two chunks
    second = runner.feed(tokens[5:], head.begin(features[5:]), 5, step=0)
    outputs = torch.cat([first, second])
    assert_close(head.logits(outputs), expected.rows(tokens, features)[2])
    some = runner.feed(tokens[5:], head.begin(features[5:]), 5, step=0, num_logits=2)
    torch.testing.assert_close(some, outputs[-2:], rtol=1e-4, atol=1e-5)

    drafts = expected.draft(tokens, features, 4, feed_back_raw=raw)
    output = outputs[-1:]
    for step, logits in enumerate(drafts):
        if step:
            token = int(drafts[step - 1].argmax())
            output = runner.feed([token], head.feed_back(output), 8 + step, step)
        assert_close(head.logits(output)[0], logits)
    assert tuple(runner.pools.layer(i).shape for i in range(len(head.kv_layers))) == head.kv_layers


@pytest.mark.parametrize(
    ("own", "flag", "longest"), [(4, None, 128), (4, 90, 90), (4, 2, 2), (256, None, 256)]
)
@pytest.mark.parametrize("case", ["deepseek nextn", "rtp"])
def test_mtp_drafts_at_all_positions_of_its_target(
    case: str, own: int, flag: int | None, longest: int, tmp_path: Path
) -> None:
    make, as_reference = FORMATS[case]
    checkpoint = make()
    expected = as_reference(checkpoint)
    assert isinstance(expected, reference.Reference)
    checkpoint.config = {**checkpoint.config, "max_position_embeddings": own}
    checkpoint.target_config["max_position_embeddings"] = 128
    folder, target = checkpoint.write(tmp_path)
    head = load_mtp(folder, target, torch.float32, CPU, max_model_len=flag)
    assert head.max_model_len == longest
    if longest >= 9:
        tokens, features = made_up(9)
        outputs = Runner(head).feed(tokens, head.begin(features), 0, step=0)
        assert_close(head.logits(outputs), expected.rows(tokens, features)[2])


@pytest.mark.parametrize("case", ["deepseek in its target", "qwen3_5_moe", "qwen3_5 dense"])
def test_mtp_node_in_a_tree_sees_only_its_ancestors(case: str, tmp_path: Path) -> None:
    make, as_reference = FORMATS[case]
    checkpoint = make()
    expected = as_reference(checkpoint)
    assert isinstance(expected, reference.Reference)
    head = load(checkpoint, tmp_path)
    tokens, features = made_up(6)
    nodes, states = made_up(5, seed=1)
    runner = Runner(head)
    runner.feed(tokens, head.begin(features), 0, step=0)
    outputs = runner.feed(nodes, head.begin(states), 6, step=1, parents=(-1, -1, 0, 1, 3))
    for path in ([0], [1], [0, 2], [1, 3], [1, 3, 4]):
        above = torch.cat([features, states[path]])
        logits = expected.rows(tokens + [nodes[i] for i in path], above)[2]
        assert_close(head.logits(outputs[path[-1] : path[-1] + 1])[0], logits[-1])


@pytest.mark.parametrize("case", ["deepseek in its target", "qwen3_5_moe", "qwen3_5 dense"])
def test_mtp_in_half_precision_is_close(case: str, tmp_path: Path) -> None:
    make, as_reference = FORMATS[case]
    checkpoint = make()
    expected = as_reference(checkpoint)
    assert isinstance(expected, reference.Reference)
    head = load_mtp(*checkpoint.write(tmp_path), torch.bfloat16, CPU, max_model_len=16)
    assert (head.dtype, head.max_model_len) == (torch.bfloat16, 16)
    tokens, features = made_up(16)
    outputs = Runner(head).feed(tokens, head.begin(features), 0, step=0)
    alike = torch.cosine_similarity(
        head.logits(outputs).double(), expected.rows(tokens, features)[2], dim=-1
    )
    assert alike.median() > 0.995  # an expert more or less makes a row differ


def test_mtp_with_raw_or_normed_feedback_gives_different_logits() -> None:
    expected = reference.deepseek(deepseek())
    tokens, features = made_up(6)
    normed = expected.draft(tokens, features, 2)
    raw = expected.draft(tokens, features, 2, feed_back_raw=True)
    assert torch.equal(normed[0], raw[0])
    assert not torch.allclose(normed[1], raw[1], atol=1e-2)


def test_block_fp8_with_partial_blocks_multiplies_each_by_its_factor() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    factors = torch.rand(2, 3, generator=generator)
    found = QuantizedWeight(weight, factors, (128, 128)).dequantise()
    assert found.dtype is torch.float32
    for i, j in [(0, 0), (127, 127), (128, 127), (127, 128), (199, 299), (130, 256)]:
        assert found[i, j] == weight[i, j].float() * factors[i // 128, j // 128]


def drop(*names: str) -> Callable[[MtpCheckpoint], object]:
    return lambda checkpoint: [checkpoint.tensors.pop(name) for name in names]


def put(name: str, tensor: Tensor) -> Callable[[MtpCheckpoint], object]:
    return lambda checkpoint: checkpoint.tensors.update({name: tensor})


def setting(name: str, value: object) -> Callable[[MtpCheckpoint], object]:
    return lambda checkpoint: checkpoint.config.update({name: value})


REFUSED: list[tuple[Callable[[], MtpCheckpoint], Callable[[MtpCheckpoint], object], str]] = [
    (deepseek, drop("model.layers.3.hnorm.weight"), r"model\.layers\.3\.hnorm\.weight"),
    (
        deepseek,
        drop("model.layers.3.mlp.experts.5.up_proj.weight"),
        r"model\.layers\.3\.mlp\.experts\.5\.up_proj\.weight",
    ),
    (
        deepseek,
        put("model.layers.3.self_attn.o_proj.weight", torch.zeros(HIDDEN_SIZE, 41)),
        r"self_attn\.o_proj\.weight .* shape \[32, 41\]; \[32, 40\]",
    ),
    (
        deepseek,
        put("model.layers.3.self_attn.indexer.wk.weight", torch.zeros(4, 4)),
        r"model\.layers\.3\.self_attn\.indexer\.wk\.weight",
    ),
    (deepseek, drop("model.layers.3.enorm.weight"), r"no tensor model\.layers\.3\.enorm\.weight"),
    (
        lambda: deepseek(num_modules=2),
        drop("model.layers.4.enorm.weight"),
        r"no tensor model\.layers\.4\.enorm\.weight",
    ),
    (
        lambda: rtp_qwen2(num_modules=2),
        drop("model.layers.0.e_norm.weight"),
        r"no tensor model\.layers\.0\.e_norm\.weight",
    ),
    (
        deepseek,
        drop(*(f"model.layers.3.{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm"))),
        r"no multi-token prediction module",
    ),
    (deepseek, drop("model.embed_tokens.weight"), r"model\.embed_tokens\.weight"),
    (deepseek, setting("model_type", "deepseek_v9"), r"model_type 'deepseek_v9'.*deepseek_v3"),
    (deepseek, setting("feed_back", "sideways"), r"feed_back is 'sideways'.*post_norm, raw"),
    (
        lambda: to_block_fp8(deepseek(), 16),
        drop("model.layers.3.self_attn.q_b_proj.weight_scale_inv"),
        r"q_b_proj\.weight_scale_inv",
    ),
    (
        lambda: to_block_fp8(deepseek(), 16),
        setting("quantization_config", {"quant_method": "awq"}),
        r"quantization_config",
    ),
    (
        lambda: to_block_fp8(deepseek(), 16),
        setting("quantization_config", {"quant_method": "fp8", "weight_block_size": [16, 0]}),
        r"quantization_config",
    ),
    (
        lambda: to_block_fp8(rtp_qwen2(), 16),
        put("lm_head.weight", torch.zeros(VOCAB_SIZE, HIDDEN_SIZE).to(torch.float8_e4m3fn)),
        r"no tensor lm_head\.weight_scale_inv",
    ),
    (
        lambda: to_block_fp8(deepseek(), 16),
        lambda checkpoint: checkpoint.config.pop("quantization_config"),
        r"q_a_proj\.weight .*float8_e4m3fn",
    ),
    (
        lambda: deepseek(num_modules=3),
        drop(*(f"model.layers.4.{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm"))),
        r"numbers \[3, 5\]",
    ),
    (lambda: qwen("qwen3_5"), drop("mtp.fc.weight"), r"mtp\.fc\.weight"),
    (
        lambda: qwen("qwen3_5"),
        put("mtp.fc_hidden.weight", torch.zeros(4, 4)),
        r"mtp\.fc_hidden\.weight",
    ),
    (
        lambda: qwen("qwen3_5_moe"),
        drop("mtp.layers.0.mlp.experts.down_proj"),
        r"mtp\.layers\.0\.mlp\.experts\.0\.down_proj\.weight",
    ),
    (rtp_qwen2, drop("model.layers.0.final_head.norm.weight"), r"final_head\.norm\.weight"),
    (
        lambda: rtp_qwen2(draft_ids=[3, 5, 7]),
        put("model.d2t", torch.tensor([3, 5, 5])),
        r"model\.d2t",
    ),
    (
        lambda: rtp_qwen2(draft_ids=[3, 5, 7]),
        put("model.d2t", torch.tensor([3, 5, VOCAB_SIZE])),
        r"model\.d2t",
    ),
    (rtp_qwen2, setting("hidden_act", "swish2"), r"config\.json"),
    (rtp_qwen2, setting("max_position_embeddings", -1), r"max_position_embeddings is -1"),
    (deepseek, setting("kv_lora_rank", -1), r"config\.json .* makes no deepseek_v3"),
    (
        lambda: rtp_qwen2(hidden_size=64),
        lambda _: None,
        r"hidden_size is 64 .* 32 .*another target",
    ),
]


@pytest.mark.parametrize(("make", "break_it", "message"), REFUSED)
def test_load_mtp_with_missing_or_unknown_tensor_names_it(
    make: Callable[[], MtpCheckpoint],
    break_it: Callable[[MtpCheckpoint], object],
    message: str,
    tmp_path: Path,
) -> None:
    checkpoint = make()
    break_it(checkpoint)
    with pytest.raises(ConfigError, match=message):
        load(checkpoint, tmp_path)
