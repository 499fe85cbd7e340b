"""The scorer of load tests whose device is simulated."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.lib.streaming_scorer import load, next_tokens
from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.models.resolve import resolve_model
from outrider.params import StopParams
from outrider.policy.base import FixedPolicy
from outrider.types import FinishReason, Request

STEP_S = 0.01
PROMPT, LENGTH = (5, 6), 24


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(None, "target", tokenizer_only=True)


def engine(folder: Path, k: int) -> Engine:
    options = SimpleNamespace(max_num_seqs=2, page_size=16, num_speculative_tokens=k)
    model, runner, _ = load(STEP_S, folder, options)  # type: ignore[arg-type]
    config = EngineConfig(
        page_size=16,
        num_pages=model.num_pages,
        max_num_seqs=2,
        max_model_len=model.max_model_len,
        num_speculative_tokens=k,
    )
    return Engine(model, config, policy=FixedPolicy(k), runner=runner)


def text() -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + LENGTH:
        last, position = torch.tensor([tokens[-1]]), torch.tensor([len(tokens) - 1])
        tokens += next_tokens(last, position).tolist()
    return tokens[len(PROMPT) :]


def test_simulated_device_takes_its_time_for_each_step(folder: Path) -> None:
    e = engine(folder, 0)
    for session in (1, 2):
        e.submit(Request(session, PROMPT, stop=StopParams(max_tokens=LENGTH)))
    outputs: dict[int, list[int]] = {1: [], 2: []}
    began, steps = time.perf_counter(), 0
    while not steps or e.snapshot().running:
        events = e.step()
        assert events is not None
        steps += 1
        for commit in events.commits:
            outputs[commit.session_id] += commit.token_ids
    assert steps == LENGTH
    assert time.perf_counter() - began >= (LENGTH - 1) * STEP_S  # a prompt's step is eager
    assert outputs == {1: text(), 2: text()}
    assert commit.finish_reason is FinishReason.LENGTH


def test_simulated_device_verifies_drafts(folder: Path) -> None:
    e, expected = engine(folder, 3), text()
    e.submit(Request(1, PROMPT, stop=StopParams(max_tokens=LENGTH)))
    e.set_drafting(1, DraftOffer("a", 3))
    output: list[int] = []
    steps = 0
    while len(output) < LENGTH:
        wrong = (*expected[len(output) : len(output) + 2], 7)
        e.post_block(PostedBlock(1, DraftTree.chain(len(PROMPT) + len(output), wrong), "a", 0))
        events = e.step()
        assert events is not None
        output += [token for commit in events.commits for token in commit.token_ids]
        steps += 1
    assert output == expected
    assert steps == LENGTH // 3, "two drafted tokens and one more"
