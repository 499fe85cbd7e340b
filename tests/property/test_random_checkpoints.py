"""Any checkpoint is served as transformers computes it, or refused by name in one line."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.batch import Model, RowSlice, pack
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.errors import ConfigError, UnsupportedModelError
from tests.support.checkpoints.random_checkpoints import (
    ALL_KINDS,
    COMMON_KINDS,
    RandomCheckpoint,
    write_random,
)

_LENGTH = 45  # tokens: longer than any window
_PAGE_SIZE, _NUM_PAGES = 4, 64


def _logits(model: Model, tokens: list[int], rng: random.Random) -> torch.Tensor:
    """Logits of all positions, computed in chunks over scattered pages, with wrong drafts."""
    pages = rng.sample(range(_NUM_PAGES), -(-len(tokens) // _PAGE_SIZE) + 2)
    found: list[torch.Tensor] = []
    done = 0
    while done < len(tokens):
        chunk = tokens[done : done + rng.choice((1, 2, 7, 20))]
        draft = [(chunk[-1] + 1) % 61] * rng.choice((0, 3))
        row = RowSlice(chunk + draft, done, pages, len(chunk) + len(draft))
        logits = model.forward(pack([row], _PAGE_SIZE, model.device))
        found.append(logits[: len(chunk)].clone())
        done += len(chunk)
    return torch.cat(found)


@torch.inference_mode()
def outcome(folder: Path, seed: int, kinds: tuple[str, ...]) -> tuple[RandomCheckpoint, str]:
    """What became of a checkpoint; raises `AssertionError` if it should not have."""
    case = write_random(folder, seed, kinds)
    options = ModelOptions(page_size=_PAGE_SIZE, num_pages=_NUM_PAGES)
    refused = ""
    try:
        paged = load_model(folder, options, dtype=torch.float32)
    except (ConfigError, UnsupportedModelError) as error:
        refused = error.message
    if refused:
        assert "\n" not in refused
        return case, refused.replace(str(folder), "FOLDER")
    assert not case.damaged, "a damaged checkpoint is served"
    assert case.model is not None
    exact: Any = case.model
    rng = random.Random(seed)
    length = min(_LENGTH, paged.max_model_len - 4)
    tokens = [rng.randrange(paged.vocab_size) for _ in range(length)]
    expected = exact(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    found = _logits(paged, tokens, rng)
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # A mixture's router may flip at a near tie.
    assert float(errors.quantile(0.9)) < 1e-3, f"served wrong: {errors}"
    assert paged.eos_token_ids == _eos(folder)
    return case, "served"


def _eos(folder: Path) -> frozenset[int]:
    eos = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    return frozenset([] if eos is None else [eos])


@pytest.mark.parametrize("seed", range(40))
def test_random_checkpoint_is_served_exactly_or_refused(tmp_path: Path, seed: int) -> None:
    outcome(tmp_path, seed, COMMON_KINDS)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_random_checkpoints_of_all_architectures_are_served_exactly_or_refused(
    tmp_path: Path,
) -> None:
    """OUTRIDER_SEEDS=FIRST:LAST takes others than the first thousand; -s shows the tally."""
    first, last = map(int, os.environ.get("OUTRIDER_SEEDS", "0:1000").split(":"))
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in range(first, last):
        about = str(seed)
        try:
            case, said = outcome(tmp_path / str(seed), seed, ALL_KINDS)
            about = case.about
            kind = "damaged" if case.damaged else "whole"
            tally[f"{kind}: {said[:60]}"] += 1
        except Exception as error:
            wrong.append(f"{about}: {type(error).__name__}: {error}")
    print(*(f"{count:5} {said}" for said, count in tally.most_common()), sep="\n")
    assert not wrong, "\n".join(wrong)
