"""Mutual TLS between services: who is let in, and certificates replaced under way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.routing.scorer import Scorer
from outrider.errors import ConfigError
from outrider.rpc.channel import open_channel
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.server import GrpcServer
from outrider.rpc.targets import Target
from tests.support.services.certificates import Issuer
from tests.support.services.fake_scorer import Script, serving
from tests.support.services.gateway import fake_scorer
from tests.support.services.scorer import generate_request

NAME = "outrider.v1.ScorerService"


@asynccontextmanager
async def healthy(tls: TlsFiles, port: int = 0, unix: Path | None = None) -> AsyncIterator[str]:
    """A server that has nothing but health; yields its address."""
    path = None if unix is None else str(unix)
    server = GrpcServer(f"127.0.0.1:{port}", lambda _: None, [NAME], unix_path=path, tls=tls)
    address = f"127.0.0.1:{await server.start()}"
    await server.set_serving(True)
    try:
        yield address
    finally:
        await server.stop(0)


async def ask(target: str | Target, tls: TlsFiles | None) -> int:
    """What health says over a new connection."""
    async with open_channel(target, tls) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=NAME), timeout=20
        )
    status: int = answer.status
    return status


async def refused(target: str | Target, tls: TlsFiles | None) -> bool:
    try:
        await ask(target, tls)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_tls_with_peer_of_another_authority_refuses_it(
    tmp_path: Path, socket_folder: Path
) -> None:
    issuer = Issuer()
    server, client = (issuer.write(tmp_path / name, "127.0.0.1") for name in ("server", "client"))
    stranger = Issuer().write(tmp_path / "stranger", "127.0.0.1")
    trusting = TlsFiles(stranger.cert, stranger.key, server.ca)
    unix = socket_folder / "scorer.sock"
    async with healthy(server, unix=unix) as address:
        assert await ask(address, client) == health_pb2.HealthCheckResponse.SERVING
        assert await refused(address, None), "no TLS"
        assert await refused(address, stranger), "a server that the client does not trust"
        assert await refused(address, trusting), "a client that the server does not trust"
        # Guarded by the file's permissions instead, whether certificates are given or not.
        assert await ask(f"unix:{unix}", None) == health_pb2.HealthCheckResponse.SERVING
        assert await ask(f"unix:{unix}", client) == health_pb2.HealthCheckResponse.SERVING


async def test_tls_with_another_name_in_the_certificate_refuses_the_server(tmp_path: Path) -> None:
    issuer = Issuer()
    server = issuer.write(tmp_path / "server", "scorer.example")
    client = issuer.write(tmp_path / "client", "gateway.example")
    async with healthy(server) as address:
        assert await ask(Target(address, "scorer.example"), client)
        assert await refused(Target(address, "other.example"), client)
        assert await refused(address, client), "the certificate does not name the IP address"


async def test_tls_with_replaced_certificates_uses_them_for_the_next_connection(
    tmp_path: Path,
) -> None:
    old, new = Issuer(), Issuer()
    files = old.write(tmp_path / "server", "127.0.0.1")
    former = old.write(tmp_path / "former", "127.0.0.1")
    async with healthy(files) as address:
        assert await ask(address, former)
        renewed = new.write(tmp_path / "renewed", "127.0.0.1")
        assert await refused(address, renewed), "not yet"
        new.write(tmp_path / "server", "127.0.0.1")
        assert await ask(address, renewed)
        assert await refused(address, former)


async def test_tls_with_broken_replacement_keeps_the_former_certificate(tmp_path: Path) -> None:
    issuer = Issuer()
    files = issuer.write(tmp_path / "server", "127.0.0.1")
    client = issuer.write(tmp_path / "client", "127.0.0.1")
    async with healthy(files) as address:
        os.unlink(files.key)
        assert await ask(address, client)
        await asyncio.to_thread(Path(files.key).write_text, "not a key")
        assert await ask(address, client)


async def test_gateway_with_replaced_certificates_dials_with_the_current(tmp_path: Path) -> None:
    ours = tmp_path / "gateway"
    old = Issuer()
    scorer_files = old.write(tmp_path / "scorer", "127.0.0.1")
    tls = old.write(ours, "127.0.0.1")
    async with healthy(scorer_files) as address:
        scorer = Scorer(Target(address), tls)
        assert await scorer.probe()
        new = Issuer()
        new.write(tmp_path / "scorer", "127.0.0.1")
        new.write(ours, "127.0.0.1")
        assert await scorer.probe()
    # The scorer's pod is replaced: gRPC's own redial would show what it was given first.
    async with healthy(scorer_files, int(address.rpartition(":")[2])):
        assert await scorer.probe()
    await scorer.close()


async def test_request_when_certificates_change_completes(tmp_path: Path) -> None:
    tls = Issuer().write(tmp_path, "127.0.0.1")
    async with serving(fake_scorer(Script(range(10, 30), delay_s=0.01)), tls=tls) as fake:
        scorer = Scorer(Target(fake.target), tls)
        answers = scorer.generate(generate_request([1, 2, 3]), (), 30.0)
        tokens = list((await anext(answers)).token_ids)
        Issuer().write(tmp_path, "127.0.0.1")
        assert await scorer.probe()
        async for answer in answers:
            tokens += answer.token_ids
        assert tokens == list(range(10, 30))
        await scorer.close()


async def test_gateway_with_half_written_certificates_keeps_its_connection(
    tmp_path: Path,
) -> None:
    issuer = Issuer()
    tls = issuer.write(tmp_path / "gateway", "127.0.0.1")
    async with healthy(issuer.write(tmp_path / "scorer", "127.0.0.1")) as address:
        scorer = Scorer(Target(address), tls)
        assert await scorer.probe()
        await asyncio.to_thread(os.truncate, tls.cert, 200)
        assert await scorer.probe()
        await scorer.close()


@pytest.mark.parametrize("what", ["cert", "key", "ca"])
async def test_tls_with_files_without_certificates_names_them(tmp_path: Path, what: str) -> None:
    files = Issuer().write(tmp_path, "127.0.0.1")
    path = Path(getattr(files, what))
    await asyncio.to_thread(path.write_text, "garbage")
    with pytest.raises(ConfigError, match=f"{path}.* this is not a certificate"):
        async with healthy(files):
            pass


async def test_tls_with_key_of_another_certificate_reports_it(tmp_path: Path) -> None:
    one, other = (Issuer().write(tmp_path / name, "127.0.0.1") for name in ("one", "other"))
    with pytest.raises(ConfigError, match=r"(?i)mismatch"):
        async with healthy(TlsFiles(one.cert, other.key)):
            pass


def test_tls_flags_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tls-key /nowhere: there is no such file"):
        TlsFiles(__file__, "/nowhere")
