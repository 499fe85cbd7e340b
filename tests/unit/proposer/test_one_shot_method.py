"""Medusa heads and MLP speculators as a proposer starts them: from folders, by method name."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from outrider.drafting.building.config import HeadConfig
from outrider.drafting.building.methods import build_proposer
from outrider.drafting.hidden_states.one_shot import OneShotProposer
from outrider.drafting.proposer import SessionStart
from outrider.errors import ConfigError
from outrider.models.tokenizer import tokenizer_hash
from outrider.params import Constraint, ConstraintKind, SamplingParams
from proposer_service.__main__ import parse
from tests.support.checkpoints.one_shot_checkpoints import (
    medusa,
    mlp_config,
    mlp_speculator,
    random,
    save,
)
from tests.support.checkpoints.tiny_pair import save_pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    target, _ = save_pair(folder, eps=0.1)
    config = AutoConfig.from_pretrained(target)
    hidden, vocab_size = config.hidden_size, config.vocab_size
    tensors = medusa(heads=3, lm_heads=False)
    for name, tensor in tensors.items():
        tensors[name] = random(*[hidden] * tensor.dim(), seed=len(name))
    speculator = mlp_config(tied=False, scaled=False) | {
        "emb_dim": hidden,
        "vocab_size": vocab_size,
    }
    mlp = mlp_speculator(speculator)
    for name, tensor in mlp.items():
        if ".emb." in name or ".head." in name:
            mlp[name] = random(vocab_size, tensor.shape[1], seed=len(name))
    mlp["speculator.proj.0.weight"] = random(speculator["inner_dim"], hidden, seed=2)
    return {
        "target": target,
        "medusa": save(folder / "medusa", {"original_lm_head": True}, tensors, "medusa_lm_head.pt"),
        "mlp_speculator": save(folder / "mlp", speculator, mlp, "model.safetensors"),
    }


@pytest.mark.parametrize("name", ["medusa", "mlp_speculator"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_shot_method_starts_by_name(folders: dict[str, Path], name: str, dtype: str) -> None:
    target, module = str(folders["target"]), str(folders[name])
    method = HeadConfig(name=name, model=module, target_model=target, dtype=dtype)  # type: ignore[arg-type]
    proposer, hash_ = build_proposer((method,), 256, print)
    assert isinstance(proposer, OneShotProposer)
    assert hash_ == tokenizer_hash(folders["target"])
    traits = proposer.traits
    assert (traits.method, traits.max_draft_tokens) == (name, 16)
    assert proposer.num_sessions == 0, "warmed up"
    needed = traits.features
    assert needed is not None
    for session, constraint in ((1, None), (2, Constraint(ConstraintKind.REGEX, "[0-9]{4}"))):
        start = SessionStart([5, 6, 7], SamplingParams(seed=1), 9, 64, constraint=constraint)
        proposer.open(session, start)
        proposer.features(session, 0, bytes(2 * needed.row_bytes))
    mask = proposer._sessions[2].mask
    assert mask is not None
    mask._future.result(timeout=60)  # compiled: the target's tokenizer is known
    trees = dict(proposer.draft([1, 2]).drafts)
    assert len(trees[1].token_ids) == 9
    assert not trees[1].is_chain
    assert trees[2].is_chain


def test_one_shot_method_drafts_chains_and_trees(folders: dict[str, Path]) -> None:
    argv = ["--scorer", "127.0.0.1:1", "--method", "medusa", "--tree-width", "1"]
    argv += ["--model", str(folders["medusa"]), "--target-model", str(folders["target"])]
    config, _ = parse(argv)
    proposer, _ = build_proposer(config.methods, 256, print)
    assert proposer.traits.max_draft_tokens == 3, "as many as there are heads"
    for flag, value in (
        *(("--tree-width", "0"), ("--threads", "0"), ("--kv-cache-memory", "-1")),
        *(("--max-model-len", "0"), ("--max-model-len", "-5")),
    ):
        with pytest.raises(ConfigError, match=flag):
            parse([*argv, flag, value])
    with pytest.raises(ConfigError, match="--project-features"):
        parse([*argv, "--project-features"])


def test_one_shot_method_without_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="ngram reads no hidden states of the target; dspark, "):
        HeadConfig(name="ngram")


def test_one_shot_method_with_checkpoint_of_another_kind_is_refused(
    folders: dict[str, Path],
) -> None:
    target = str(folders["target"])
    method = HeadConfig(name="mlp_speculator", model=str(folders["medusa"]), target_model=target)
    with pytest.raises(ConfigError, match="model_type is None, not 'mlp_speculator'"):
        build_proposer((method,), 256, print)
