"""Hostile proposers and unusual requests, in turns with drafts: each text is that without them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outrider.models.tokenizer import hash_if_any
from outrider.rpc.channel import open_channel
from outrider.v1 import draft_pb2, scorer_pb2_grpc
from tests.support.services.scripted_proposer import (
    Drafted,
    ScriptedProposer,
    block,
    hello,
    proposing,
)
from tests.vllm.conftest import TARGET, Engine
from tests.vllm.test_ahead import mixed
from tests.vllm.test_texts import GREEDY, PROMPTS, SAMPLED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

VOCAB = 8192
STORY = "Once there was a little dog who liked to run in the park with a red ball. " * 8
Blocks = Callable[[Drafted], list[draft_pb2.Block]]
HOSTILE: dict[str, Blocks] = {
    "tokens outside the vocabulary": lambda s: [block(s, [VOCAB, 2**31])],
    "the last token of the vocabulary": lambda s: [block(s, [VOCAB - 1] * 8)],
    "other epochs": lambda s: [block(s, [5] * 4, epoch=s.epoch + each) for each in (1, 2**31)],
    "sessions of nobody": lambda s: [block(s, [5], session=s.id + 2**20)],
    "what was never committed": lambda s: [block(s, [5], base_len=len(s.tokens) + 40)],
    "parents after children": lambda s: [block(s, [5, 6], parents=[1, -1])],
    "a flood": lambda s: [block(s, [s.tokens[-1]] * 64)] * 200,
}


@contextmanager
def hostile(engine: Engine, blocks: Blocks) -> Iterator[None]:
    """Attach a proposer that answers so, and dials again when it is sent away."""
    stop, attached = threading.Event(), threading.Event()
    opened: list[draft_pb2.Open] = []

    async def attack() -> None:
        stopped = asyncio.ensure_future(asyncio.to_thread(stop.wait))
        for incarnation in itertools.count(1):
            fields = {"vocab_size": VOCAB, "tokenizer_hash": hash_if_any(TARGET)}
            greeting = hello(**fields, incarnation=incarnation, data_connection=False)
            async with open_channel(engine.info["grpc"]) as channel:
                stub = scorer_pb2_grpc.ScorerServiceStub(channel)
                script = ScriptedProposer(stub, blocks, greeting, opens=opened)
                async with proposing(script) as proposer:
                    attached.set()
                    sent_away = asyncio.create_task(proposer.ended.wait())
                    await asyncio.wait((sent_away, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return

    thread = threading.Thread(target=lambda: asyncio.run(attack()))
    thread.start()
    try:
        assert attached.wait(20)
        yield
    finally:
        stop.set()
        thread.join(30)
        engine.wait_attached(0)
    assert opened, "it was asked for drafts"


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, Any]:
    return {
        "sampled": engine.texts(PROMPTS, **SAMPLED),
        "mixed": engine.answers(PROMPTS, mixed()),
        "several": several(engine),
        "story": engine.texts([STORY], **GREEDY),
    }


def several(engine: Engine) -> list[tuple[int, ...]]:
    """Return three answers to each of some prompts."""
    from vllm import SamplingParams

    params = [SamplingParams(n=3, seed=i, **SAMPLED) for i in range(4)]
    outputs = engine.llm.generate(PROMPTS[:4], params, use_tqdm=False)
    return [tuple(each.token_ids) for output in outputs for each in output.outputs]


@pytest.mark.parametrize("blocks", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_proposer_costs_no_text(
    blocks: Blocks, engine: Engine, plain: dict[str, Any]
) -> None:
    with hostile(engine, blocks):
        assert engine.texts(PROMPTS, **SAMPLED) == plain["sampled"]


def test_unusual_requests_have_their_texts_with_drafts(
    engine: Engine, plain: dict[str, Any]
) -> None:
    """Grammars, stop strings, several answers to a prompt, and a prompt from the prefix cache."""
    with engine.proposer("--method", "draft_model"):
        engine.drafted()
        assert engine.answers(PROMPTS, mixed()) == plain["mixed"]
        assert engine.drafted()[1] > 0
        answers = several(engine)
        assert answers == plain["several"]
        assert len({*answers}) == 12
        assert engine.drafted()[1] > 0
        for _ in range(2):
            assert engine.texts([STORY], **GREEDY) == plain["story"]
        assert engine.drafted()[1] > 0


def test_aborted_requests_leave_the_others_texts_alone(
    engine: Engine, plain: dict[str, Any]
) -> None:
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    with engine.proposer("--method", "draft_model"):
        for _ in range(2):  # the second time under names that ended in the midst of a draft
            for i, prompt in enumerate(PROMPTS):
                llm.add_request(f"{i}", prompt, SamplingParams(seed=i, **SAMPLED))
            texts = {}
            for step in itertools.count(1):
                outputs = llm.step()
                texts |= {int(x.request_id): tuple(x.outputs[0].token_ids) for x in outputs}
                if step == 4:
                    llm.abort_request([f"{i}" for i in range(0, 16, 3)])
                if not llm.has_unfinished_requests():
                    break
            for i in range(16):
                assert i % 3 == 0 or texts[i] == plain["sampled"][i]
