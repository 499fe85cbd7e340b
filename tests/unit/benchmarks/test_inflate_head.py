"""An inflated module drafts what the small one drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.inflate import ShapeError
from benchmarks.inflate_head import DSPARK_LAYERS, inflate
from outrider.drafting.hidden_states.forward import HeadForward
from outrider.engine.batch import RowSlice, pack
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from tests.support.checkpoints import block_checkpoints as block
from tests.support.checkpoints import eagle_checkpoints as made
from tests.support.checkpoints.block_reference import dflash
from tests.support.checkpoints.loading import load_eagle3

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 130,
    "draft_vocab_size": 60,
}


def folders(root: Path, draft_vocab: int | None, own_head: bool = True) -> Path:
    """A small module, its target, and the target with more channels and tokens."""
    made.save_target(root / "target")
    tensors = made.eagle3_tensors(draft_vocab=draft_vocab)
    if not own_head:
        del tensors["lm_head.weight"]
    made.save_head(root / "head", tensors, made.LLAMA)
    large = root / "large target"
    large.mkdir()
    words = load_file(root / "target" / "model.safetensors")["model.embed_tokens.weight"]
    embedding = torch.zeros(SHAPE["vocab_size"], SHAPE["hidden_size"])
    embedding[: len(words), : words.shape[1]] = words
    save_file({"model.embed_tokens.weight": embedding}, large / "model.safetensors")
    config = json.loads((root / "target" / "config.json").read_text()) | SHAPE
    (large / "config.json").write_text(json.dumps(config))
    return root


def logits(folder: Path, target: Path, features: Tensor) -> Tensor:
    """Of four greedy steps after made-up tokens: [4, vocab]."""
    head = load_eagle3(folder, target, torch.float64, CPU)
    head.bind(KVPools(8, 4, head.dtype, CPU))
    backend = choose_backend("sdpa", head.attention_traits(), CPU)
    found: list[Tensor] = []
    with torch.inference_mode():
        forward = HeadForward(head, backend, 4, features)
        tokens, start = [(7 * i) % made.VOCAB_SIZE for i in range(len(features))], 0
        for _ in range(4):
            batch = pack([RowSlice(tokens, start, [5, 1, 3, 2], 1)], 4, CPU)
            found.append(forward.forward(batch)[0].clone())
            start, tokens = start + len(tokens), [int(found[-1].argmax())]
    return torch.stack(found)


@pytest.mark.parametrize(("draft_vocab", "own_head"), [(40, True), (None, True), (None, False)])
def test_inflated_head_logits_equal_the_small_modules(
    tmp_path: Path, draft_vocab: int | None, own_head: bool
) -> None:
    root = folders(tmp_path, draft_vocab, own_head)
    shape = SHAPE | ({} if draft_vocab else {"draft_vocab_size": 120})
    inflate(root / "head", root / "target", root / "large", shape, CPU, torch.float64)
    small = made.features(9, 3 * made.HIDDEN_SIZE)
    large = torch.zeros(9, 3, SHAPE["hidden_size"], dtype=torch.bfloat16)
    large[:, :, : made.HIDDEN_SIZE] = small.view(9, 3, -1)
    large[:, :, made.HIDDEN_SIZE] = 2.0**-12  # the constant channel of the target's states
    expected = logits(root / "head", root / "target", small)
    found = logits(root / "large", root / "large target", large.flatten(1))
    torch.testing.assert_close(found[:, : made.VOCAB_SIZE], expected, rtol=1e-6, atol=1e-6)
    extra = found[:, made.VOCAB_SIZE :]
    known = shape["draft_vocab_size"] - (draft_vocab or made.VOCAB_SIZE)
    assert extra.isfinite().sum(dim=1).tolist() == [known] * 4
    assert extra.max() < -1e6


def dspark_logits(
    folder: Path, head: Tensor, features: Tensor, words: Tensor, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Return logits and confidences of a block's slots, by the formula.

    They follow the tokens `before`, of an `rnn` as if each were the block's first.
    """
    tensors = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    count = config["num_hidden_layers"]
    slots = dflash(tensors, config, features, words, causal=[False] * count, windows=[None] * count)
    markov = tensors["markov_head.markov_w1.weight"][before]
    told = markov
    if "markov_head.joint_proj.weight" in tensors:
        joint = torch.cat((torch.zeros_like(markov), markov, slots), 1)
        joint = joint @ tensors["markov_head.joint_proj.weight"].T
        told = torch.tanh(joint + tensors["markov_head.joint_proj.bias"])[:, 2 * block.RANK :]
    bias = told @ tensors["markov_head.markov_w2.weight"].T
    sure = torch.cat((slots, markov), 1) @ tensors["confidence_head.proj.weight"].T
    return slots @ tensors.get("lm_head.weight", head).double().T + bias, sure


@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_inflated_dspark_logits_equal_the_small_modules(tmp_path: Path, markov: str) -> None:
    target, known, hidden = made.save_target(tmp_path / "target"), made.VOCAB_SIZE, made.HIDDEN_SIZE
    tensors = block.dspark_tensors(markov=markov)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    config = block.DSPARK | {
        "rms_norm_eps": 1e-9,
        "markov_head_type": markov,
    }  # the same one serves wider heads and states
    small = made.save_head(tmp_path / "head", tensors, config, made.save_safetensors)
    shape = SHAPE | {"draft_vocab_size": 120}
    inflate(small, target, tmp_path / "large", shape, CPU, torch.float64)
    large = json.loads((tmp_path / "large" / "config.json").read_text())
    assert large["num_hidden_layers"] == DSPARK_LAYERS > block.NUM_LAYERS

    states, words = made.features(9, 3 * hidden), made.features(5, hidden, seed=1)
    wide_states, wide_words = torch.zeros(9, 3, 96), torch.zeros(5, 96)
    wide_states[:, :, :hidden], wide_words[:, :hidden] = states.view(9, 3, -1), words
    wide_states[:, :, hidden] = wide_words[:, hidden] = 2.0**-12  # the target's constant channel
    before = torch.arange(5)
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    expected, sure = dspark_logits(small, head, states, words, before)
    found = dspark_logits(tmp_path / "large", head, wide_states.flatten(1), wide_words, before)
    torch.testing.assert_close(found[0][:, :known], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], sure, rtol=1e-4, atol=1e-4)
    assert found[0][:, known:].max() < -1e6


def test_inflate_with_another_layout_raises(tmp_path: Path) -> None:
    target = made.save_target(tmp_path / "target")
    tensors = made.eagle3_tensors(layer="layers.0.")
    head = made.save_head(tmp_path / "head", tensors, made.LLAMA)
    with pytest.raises(ShapeError, match="midlayer"):
        inflate(head, target, tmp_path / "large", SHAPE, CPU, torch.float64)
