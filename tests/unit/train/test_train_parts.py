"""The parts of training: data, chains, acceptance, what processes share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from outrider.errors import ConfigError
from outrider.train.data import Source, draft_vocabulary, read_tokens
from outrider.train.evaluate import Acceptance, acceptance
from outrider.train.layers import chain_mask
from outrider.train.target import Target, TargetBatch, load_target
from tests.support.checkpoints.train import process_environment, save_target, save_text
from tests.support.models.architectures import ARCHITECTURES, random_model
from tests.support.ports import reserved_port
from training.evaluate import acceptance as coupled_acceptance

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train")
    save_target(path / "target")
    save_text(path / "text.npy")
    return path


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2", "gpt2", "opt", "gpt_neox"])
def test_target_read_of_any_model_returns_its_states_and_logits(name: str) -> None:
    model: Any = random_model(ARCHITECTURES[name], torch.float32)
    token_ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    read = Target(model).read(token_ids, (1, 2))
    with torch.no_grad():
        said = model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
    assert torch.equal(read.logits, said.logits)  # capped, scaled
    assert torch.equal(read.hidden, said.hidden_states[-1])
    assert torch.equal(read.layers[..., : read.hidden.shape[-1]], said.hidden_states[1])


AVERAGE = """
import torch
from outrider.train.processes import Processes
processes = Processes()
module = torch.nn.Linear(2, 1)
module.weight.data.fill_(processes.rank)
processes.share_weights(module)
module.weight.grad = torch.tensor([[1.0, 2.0]]) * (1 + 2 * processes.rank)
module.bias.grad = torch.tensor([5.0 - processes.rank])
processes.average_gradients(module)
rows = torch.arange(5)[:, None]
print(processes.gather(processes.share(rows)).flatten().tolist())
print(module.weight.tolist(), module.weight.grad.tolist(), module.bias.grad.tolist(),
      processes.agree(0.25 + processes.rank))
processes.wait()
processes.close()
"""


def test_processes_of_several_ranks_average_their_gradients() -> None:
    port = reserved_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", AVERAGE],
            env=process_environment(rank, port),
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=100)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert said == ["[0, 2, 1, 3]\n[[0.0, 0.0]] [[2.0, 4.0]] [4.5] 0.25\n"] * 2


def test_chain_mask_at_any_step_shows_true_rows_then_the_own_chain() -> None:
    length = 6
    mask = chain_mask(length, 3, CPU).view(length, 3, length)
    for row in range(length):
        for step in range(3):
            seen = mask[row, step].nonzero()[:, 0].tolist()
            begin = row - 2
            assert seen == (
                list(range(begin + 1)) if step == 0 else [begin + step][begin < -step :]
            )


class Oracle:
    """Guesses the text's own tokens at some depths, and wrong ones at others."""

    layers: tuple[int, ...] = ()
    draft_ids = None

    def __init__(self, right: list[bool], vocab_size: int) -> None:
        self.right, self.vocab_size = right, vocab_size

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        wanted = torch.roll(batch.token_ids, -2, 1)[:, :-1]
        for right in self.right[:num_steps]:
            guess = wanted if right else (wanted + 1) % self.vocab_size
            yield torch.nn.functional.one_hot(guess, self.vocab_size).float()


def test_acceptance_of_any_head_replays_rounds(folder: Path) -> None:
    target = load_target(folder / "target", CPU, torch.float32)
    text = torch.from_numpy(np.load(folder / "text.npy")[None, :40]).long()
    head: Any = Oracle([True, True, False, True], 512)
    result = acceptance(head, target, text, 10, 4)
    assert result.matches == (1.0, 1.0, 0.0, 1.0)
    assert result.reached == (1.0, 1.0, 0.0, 0.0)
    assert result.mean_length == 3.0
    assert result.below_rule == (3,)
    assert result.lines()[-1].startswith("below the rule at position 3: train longer")


@pytest.mark.parametrize(
    ("reached", "below"),
    [
        ((0.81, 0.61, 0.41, 0.1), ()),
        ((0.8, 0.6, 0.4), (1, 2, 3)),
        ((0.9, 0.5, 0.45), (2,)),
        ((0.9, 0.7), ()),
        ((0.7,), (1,)),
    ],
)
def test_verdict_on_acceptance_names_positions_below_the_rule(
    reached: tuple[float, ...], below: tuple[int, ...]
) -> None:
    result = Acceptance(reached, reached, 1.0 + sum(reached))
    facts = result.facts()
    assert (facts["below_rule"], facts["well_trained"]) == (below, not below)
    assert facts["reached"] == reached
    said = result.lines()[-1]
    assert said.startswith("below the rule" if below else "well trained")
    assert all(str(position) in said for position in below)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_with_the_targets_weights_is_full(folder: Path, temperature: float) -> None:
    target = load_target(folder / "target", CPU, torch.float32)
    prompts = torch.randint(2, 200, (3, 9), generator=torch.Generator().manual_seed(1))
    found = coupled_acceptance(target, target.logits, prompts, 24, temperature)
    assert found["agreement"] == 1.0
    assert found["K=4"]["mean_length"] == 5.0


def test_source_in_an_epoch_yields_every_window_once() -> None:
    source = Source(np.arange(1000), 9, 1)
    assert source.width == 10
    starts = source.rows(0, source.count)[:, 0]
    assert len(set(starts.tolist())) == source.count == 99
    assert len(set((starts % 10).tolist())) == 1
    later = source.rows(source.count, source.count)[:, 0]
    assert set(later.tolist()) != set(starts.tolist())
    rows = Source(np.arange(120).reshape(6, 20), 9, 1)
    assert sorted(rows.rows(0, rows.count)[:, 0].tolist()) == list(range(0, 120, 10))


def test_draft_vocabulary_of_any_text_has_the_most_frequent_tokens() -> None:
    ids = draft_vocabulary([np.array([5, 5, 5, 1, 1, 7]), np.array([[7, 7], [7, 2]])], 9, 2)
    assert ids.tolist() == [5, 7]


@pytest.mark.parametrize(
    "content", ["hello world", [{"type": "text", "text": text} for text in ("hello ", "world")]]
)
def test_read_tokens_of_jsonl_ends_documents(content: object, folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    path = tmp_path / "rows.jsonl"
    chat = {"messages": [{"role": "user", "content": content}]}
    line = json.dumps({"text": "STOP\u2028"}, ensure_ascii=False)
    path.write_text(line + "\n\n" + json.dumps(chat) + "\n", encoding="utf-8")
    tokens = read_tokens(path, tokenizer).tolist()
    assert tokens.count(1) == 2
    assert tokens[-1] == 1
    assert tokenizer.decode(tokens) == "STOP\u2028</s><s><|user|>hello world\n</s>"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name"),
        ('{"text": 5}', "neither `text` nor `messages`"),
        *((f'{{"messages": {m}}}', "no list of objects") for m in ("null", "[]", "{}", '["hi"]')),
        ('{"messages": [{"role": "system"}]}', "only users speak"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "no text"),
    ],
)
def test_read_tokens_of_wrong_line_names_it(
    line: str, said: str, folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('only users speak') }}{% endif %}"
    )
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "hello"}\n' + line)
    with pytest.raises(ConfigError, match=f"--data {path}, line 2: .*{said}"):
        read_tokens(path, tokenizer)


def test_read_tokens_of_long_text_does_not_warn(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "target", model_max_length=4)
    path = tmp_path / "long.txt"
    path.write_text("hello world " * 10, encoding="utf-8")
    assert len(read_tokens(path, tokenizer)) > 4
    assert not tokenizer.deprecation_warnings  # where transformers notes what it warned of
