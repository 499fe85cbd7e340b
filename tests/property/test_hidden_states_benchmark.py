"""The benchmark of hidden-state methods, with heads that know a text by heart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.hidden_states import draft_model, heads, load_target, row, tables
from benchmarks.lib.replay import record, replay
from outrider.params import SamplingParams
from tests.support.checkpoints import eagle_checkpoints
from tests.support.checkpoints.one_shot_checkpoints import mlp_config, mlp_speculator, random, save
from tests.support.checkpoints.tiny_pair import save_pair

PROMPT, OUTPUT, K = tuple(range(2, 30)), 24, 3


def medusa_by_heart(target: Path, folder: Path, text: tuple[int, ...]) -> Path:
    """Heads whose output layers map each state of `text` to what comes there: one state per token
    and more dimensions than tokens, so that there is an exact solution."""
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        states = model.model(torch.tensor([text])).last_hidden_state[0]  # after the final norm
    states = states[len(PROMPT) - 1 :].double()
    hidden, vocab_size = states.shape[1], model.config.vocab_size
    tensors = {}
    for i in range(K):
        wanted = torch.tensor(text[len(PROMPT) + 1 + i :])
        one_hot = torch.nn.functional.one_hot(wanted, vocab_size).double() * 8
        weight = (torch.linalg.pinv(states[: len(wanted)]) @ one_hot).T
        tensors[f"{i}.0.linear.weight"] = torch.zeros(hidden, hidden)
        tensors[f"{i}.0.linear.bias"] = torch.zeros(hidden)
        tensors[f"{i}.1.weight"] = weight.float()
    return save(folder, {"medusa_num_heads": K}, tensors, "medusa_lm_head.safetensors")


def speculator(folder: Path, hidden: int, vocab_size: int) -> Path:
    config = mlp_config(n_predict=K, tied=True, scaled=True)
    config |= {"emb_dim": hidden, "vocab_size": vocab_size}
    tensors = mlp_speculator(config)
    for kind in ("emb", "head"):
        tensors[f"speculator.{kind}.0.weight"] = random(vocab_size, config["inner_dim"], seed=5)
    tensors["speculator.proj.0.weight"] = random(config["inner_dim"], hidden, seed=6)
    return save(folder, config, tensors, "model.safetensors")


def eagle3(folder: Path, hidden: int, vocab_size: int) -> Path:
    """Of another target's kind: it guesses at random."""
    sizes = {"target_hidden": hidden, "vocab_size": vocab_size}
    tensors = eagle_checkpoints.eagle3_tensors(**sizes, embedding=True)
    config = {**eagle_checkpoints.LLAMA, "vocab_size": vocab_size, "target_hidden_size": hidden}
    return eagle_checkpoints.save_head(folder, tensors, config)


def test_replay_of_a_head_that_knows_the_text_accepts_all_of_it(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, eps=0.5)
    greedy = SamplingParams(0.0)
    (plain,) = record(load_target(target, []), [(PROMPT, greedy)], OUTPUT)
    text = (*PROMPT, *plain.token_ids)
    config = AutoModelForCausalLM.from_pretrained(target).config
    given = {
        "medusa": str(medusa_by_heart(target, tmp_path / "medusa", text)),
        "mlp_speculator": str(speculator(tmp_path / "mlp", config.hidden_size, config.vocab_size)),
        "eagle3": str(eagle3(tmp_path / "eagle3", config.hidden_size, config.vocab_size)),
    }
    contenders = heads(given, str(target), [K], tree_nodes=[9])
    assert [(c.name, c.shape, c.k) for c in contenders] == [
        *(("medusa", "chain", K), ("medusa", "tree", 9)),
        *(("mlp_speculator", "chain", K), ("mlp_speculator", "tree", 9)),
        *(("eagle3", "chain", K), ("eagle3", "tree", 9)),
    ]
    contenders += draft_model(draft, [K])
    specs = [spec for c in contenders if (spec := c.proposer.traits.features) is not None]
    model = load_target(target, specs)
    rows = []
    for sampling in (greedy, SamplingParams(0.9, seed=3)):
        alone, *_ = texts = record(model, [(PROMPT, sampling)] * 2, OUTPUT)
        assert [one.token_ids for one in texts] == [alone.token_ids] * 2
        for one in contenders:
            rows.append(row(sampling.temperature, one, texts, ["known", ""], 1))
            assert rows[-1].by_category == {"known": replay([alone], one.proposer, one.k).length}
    for known in rows[:2]:
        assert known.length > K
        assert known.positions[0] == 1.0
    assert rows[0].drafted <= K < rows[1].drafted
    assert rows[0].state_bytes == 2 * config.hidden_size
    lines = tables(rows)
    assert sum(line.startswith("| 0 medusa") for line in lines) == 4
    assert sum("known" in line for line in lines) == 1


def test_heads_with_a_method_that_reads_no_states_raises(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="ngram reads no hidden states"):
        heads({"ngram": "x"}, str(tmp_path), [K], [])
