"""Whole stacks, started once: real processes, real gRPC, a tiny random pair, float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.services.up import EVERY_ROUND, Up, running


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft that differ often enough for every kind of token to occur."""
    # Here, since xdist's controller also reads this file, and needs no torch.
    from tests.support.checkpoints.tiny_pair import save_pair

    return save_pair(tmp_path_factory.mktemp("pair"), eps=0.15)


@pytest.fixture(scope="package")
def draft_model_stack(pair: tuple[Path, Path]) -> Iterator[Up]:
    """The stack with a draft model."""
    target, draft = pair
    with running("--model", target, "--draft-model", draft, "--seed", 11, *EVERY_ROUND) as up:
        yield up
