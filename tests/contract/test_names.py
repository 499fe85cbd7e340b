"""Where scorers are found: pods come and go, nobody is restarted, nothing that runs is cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.drafting.building.config import NgramConfig
from outrider.errors import ConfigError
from outrider.rpc.deployment import Deployment
from outrider.rpc.telemetry import configure
from proposer_service.config import LinkConfig, ProposerConfig
from proposer_service.service import ProposerService
from tests.support.ports import reserved_port
from tests.support.services.certificates import Issuer
from tests.support.services.draft_scorer import Context, DraftScorer, Requests, close, open_
from tests.support.services.fake_scorer import Script, serving
from tests.support.services.gateway import fake_scorer, running_gateway, tokens
from tests.support.services.names import Names
from tests.support.waiting import until

A, B = "127.0.0.1", "127.0.0.2"  # the addresses of two pods
TEXT = "hello world, the quick brown fox jumps over the lazy dog"


def proposer(scorer: str) -> ProposerService:
    config = ProposerConfig(
        scorers=(scorer,),
        methods=(NgramConfig(max_branches=0),),
        proposer_id="p",
        link=LinkConfig(backoff_first_s=0.01, backoff_max_s=0.1),
        dns_refresh_s=0.1,
        deployment=Deployment(drain_grace_s=5),
    )
    return ProposerService(config, telemetry=configure("proposer"))


async def test_gateway_with_dns_name_follows_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    names, port = Names(monkeypatch), reserved_port(A, B)
    names.table["scorers"] = [A]
    held = Script(tokens(TEXT), per_round=2, delay_s=0.05)
    async with (
        serving(fake_scorer(held, "a"), port, A) as a,
        serving(fake_scorer(Script(tokens(TEXT)), "b"), port, B) as b,
        running_gateway(a, scorers=(f"dns:scorers:{port}",), dns_refresh_s=0.1) as gateway,
    ):
        ask = gateway.client.completions.create
        running = asyncio.create_task(ask(model="default", prompt=[5, 6, 7]))
        await until(lambda: a.running == 1)
        names.table["scorers"] = [B]
        await names.asked_again()
        assert (await ask(model="default", prompt=[5, 6, 7])).choices[0].text == TEXT
        assert len(b.requests) == 1, "new requests go to the new address"
        answer = await running
        assert answer.choices[0].text == TEXT
        assert len(a.requests) == 1, "and what ran on the old one ended there"
        assert a.cancelled == 0

        names.table["scorers"] = [A, B]
        for _ in range(200):
            await ask(model="default", prompt=[5, 6, 7, len(a.requests) + len(b.requests)])
            if len(a.requests) > 1:
                break
            await asyncio.sleep(0.02)
        assert len(a.requests) > 1, "an address that comes back is used again"


async def test_gateway_with_missing_key_dials_a_new_scorer_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tls, key = Issuer().write(tmp_path, "scorers"), tmp_path / "tls.key"
    names, port = Names(monkeypatch), reserved_port(A, B)
    names.table["scorers"] = [A]

    def failures() -> int:
        return caplog.text.count(f"{B}:{port} cannot be dialled")

    async with (
        serving(fake_scorer(Script(tokens(TEXT)), "a"), port, A, tls) as a,
        serving(fake_scorer(Script(tokens(TEXT)), "b"), port, B, tls),
        running_gateway(
            a,
            scorers=(f"dns:scorers:{port}",),
            dns_refresh_s=0.1,
            deployment=Deployment(drain_grace_s=0.5, tls=tls),
        ) as gateway,
    ):
        key.rename(tmp_path / "kept")
        names.table["scorers"] = [A, B]
        await until(lambda: failures() == 1)
        names.table["scorers"] = [A]
        await names.asked_again()
        names.table["scorers"] = [A, B]
        await until(lambda: failures() == 2)
        (tmp_path / "kept").rename(key)
        await until(lambda: gateway.metric("gateway_scorers_serving") == 2)
        assert failures() == 2, "told once, however often it was tried"


@contextlib.asynccontextmanager
async def drafting_for(names: Names, a: DraftScorer, b: DraftScorer) -> AsyncIterator[None]:
    """A proposer dials the name `scorers`, whose addresses `a` and `b` may have; at first `a`."""
    port = reserved_port(A, B)
    names.table["scorers"] = [A]
    service = proposer(f"dns:scorers:{port}")
    try:
        await a.start(port, A)
        await b.start(port, B)
        await service.start()
        yield
    finally:
        await service.stop()
        await a.stop()
        await b.stop()


async def test_proposer_with_dns_name_follows_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch)
    a, b = DraftScorer(), DraftScorer()
    async with drafting_for(names, a, b):
        first = await a.attached()
        first.send(opens=[open_(1, [5, 6, 7, 5, 6])])
        await first.next_block()
        names.table["scorers"] = [B]
        second = await b.attached()
        second.send(opens=[open_(9, [5, 6, 7, 5, 6])])
        await second.next_block()
        assert not first.ended.is_set(), "its session goes on"
        first.send(closes=[close(1)])
        assert (await first.next()).HasField("goodbye")
        async with asyncio.timeout(10):
            await first.ended.wait()
        second.send(closes=[close(9)])
        names.table["scorers"] = [A, B]
        await a.attached()


class Hesitant(DraftScorer):
    """Answers nobody before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.dialled, self.answers = asyncio.Event(), asyncio.Event()

    async def Draft(self, request_iterator: Requests, context: Context) -> None:  # noqa: N802
        self.dialled.set()
        await self.answers.wait()
        await super().Draft(request_iterator, context)


async def test_proposer_when_a_delisted_scorer_still_answers_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch)
    a, b = Hesitant(), DraftScorer()
    async with drafting_for(names, a, b):
        async with asyncio.timeout(10):
            await a.dialled.wait()
        names.table["scorers"] = [B]
        kept = await b.attached()
        a.answers.set()
        left = await a.attached()
        async with asyncio.timeout(10):
            await left.ended.wait()
        assert not kept.ended.is_set()


async def test_proposer_with_unix_socket_dials_a_restarted_scorer(socket_folder: Path) -> None:
    path = str(socket_folder / "scorer.sock")
    service = proposer(f"unix:{path}")
    scorer = DraftScorer()
    try:
        await service.start()  # before there is a scorer
        with socket.socket(socket.AF_UNIX) as left_over:
            left_over.bind(path)  # by a scorer that was killed
        for _ in range(2):
            await scorer.start(unix_path=path)
            stream = await scorer.attached()
            stream.send(opens=[open_(1, [5, 6, 7, 5, 6])])
            await stream.next_block()
            await scorer.stop()  # its container is restarted
    finally:
        await service.stop()
        await scorer.stop()


async def test_scorer_with_impossible_socket_path_names_it(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "scorer.sock")
    with pytest.raises(ConfigError, match=f"unix:{path}: its folder must exist"):
        await DraftScorer(data_connections=False).start(unix_path=path)
