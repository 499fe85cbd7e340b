"""Methods that read the target's hidden states: speculation changes speed, never text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.v1 import common_pb2
from tests.support.checkpoints.tiny_heads import save_dflash, save_eagle, save_eagle3
from tests.support.checkpoints.tiny_pair import save_pair
from tests.support.services.options import GenerateOptions
from tests.support.services.up import EVERY_ROUND, Up, complete, complete_all, running

pytestmark = pytest.mark.timeout(400)

PROMPT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci("
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seed-1": {"temperature": 1.0, "seed": 1},
    "top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 2**63 + 5},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("unit_pair"), eps=0.1, unit_embedding=True)


_SAVE = {
    "eagle": lambda folder, pair: save_eagle(folder, pair[1]),
    "eagle3": lambda folder, pair: save_eagle3(folder, pair[0]),
    "dflash": lambda folder, pair: save_dflash(folder, pair[0]),
}


@pytest.fixture(
    scope="module",
    params=[
        "eagle",
        "dflash",
        pytest.param("dflash --in-process", marks=pytest.mark.slow),
        pytest.param("eagle3", marks=pytest.mark.slow),
    ],
)
def stack(
    request: pytest.FixtureRequest,
    pair: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Up]:
    """One with a module that is often right, and some with modules that are hardly ever."""
    method, *within = request.param.split()
    head = _SAVE[method](tmp_path_factory.mktemp("heads") / method, pair)
    flags = ("--method", method, "--draft-model", head, *EVERY_ROUND)
    with running("--model", pair[0], *flags, beside=not within) as up:
        yield up


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_hidden_state_methods_with_any_number_of_draft_tokens_keep_the_text(
    stack: Up, sampling: str
) -> None:
    def request(**changes: object) -> GenerateOptions:
        return GenerateOptions(
            prompt=PROMPT,
            max_tokens=40,
            ignore_eos=True,
            aux_info=True,
            **{**SAMPLINGS[sampling], **changes},
        )

    plain = await complete(stack.grpc, request(speculation=False), timeout_s=120)
    assert set(plain.kinds) == {common_pb2.TOKEN_KIND_PLAIN}
    accepted = 0
    drafted = (request(num_speculative_tokens=k) for k in (1, 4, 8))
    for k, done in zip((1, 4, 8), await complete_all(stack.grpc, *drafted), strict=True):
        assert (done.text, done.token_ids) == (plain.text, plain.token_ids), f"K = {k}"
        assert done.aux.drafted > 0
        accepted += done.aux.accepted
    if list(done.aux.proposer_ids) == ["proposer-eagle"]:
        assert accepted > 0  # else nothing was compared with nothing
