"""A whole gateway on loopback ports over fake scorers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import uvicorn.server
from opentelemetry.sdk.trace.export import SpanExporter

from gateway.config import GatewayConfig
from gateway.service import Gateway
from outrider.models.tokenizer import Tokenizer
from outrider.rpc.deployment import Deployment
from outrider.rpc.telemetry import Telemetry, configure
from outrider.rpc.versions import STEPS_VERSION
from outrider.v1 import scorer_pb2
from tests.support.models.tokenizers import byte_level_bpe, save
from tests.support.services.fake_scorer import FakeScorer, Script, serving

MAX_MODEL_LEN = 256


@cache
def _folder() -> tuple[TemporaryDirectory[str], Path]:
    keep = TemporaryDirectory()
    return keep, save(byte_level_bpe(), Path(keep.name))


def model_folder() -> Path:
    return _folder()[1]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_folder())


def tokens(text: str) -> list[int]:
    """The tokens of a completion: no BOS."""
    return tokenizer().encode(text)[1:]


@contextmanager
def tokenizers_that_hang() -> Iterator[None]:
    """As if so many long prompts came before the next one."""
    over = threading.Event()

    def encode(*_: object, **__: object) -> list[int]:
        over.wait(60)
        return [1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "encode", encode)
        try:
            yield
        finally:
            over.set()


@contextmanager
def _hurried_uvicorn() -> Iterator[None]:
    """Let uvicorn look for its end every 5 ms: each of hundreds of tests would wait for 0.2 s."""
    looks = {**vars(asyncio), "sleep": lambda delay_s: asyncio.sleep(delay_s / 20)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**looks))
        yield


def fake_scorer(script: Script, name: str = "scorer-a", **info: Any) -> FakeScorer:
    fields = {
        "scorer_id": name,
        "model": "tiny",
        "vocab_size": tokenizer().vocab_size,
        "tokenizer_hash": tokenizer().hash,
        "max_model_len": MAX_MODEL_LEN,
        "protocol_version": 1,
        "steps_version": STEPS_VERSION,
        **info,
    }
    return FakeScorer(script, scorer_pb2.GetScorerInfoResponse(**fields))


@dataclass
class Running:
    """A gateway under test."""

    http: str
    grpc: str
    scorers: list[FakeScorer]
    client: openai.AsyncOpenAI
    telemetry: Telemetry

    @property
    def scorer(self) -> FakeScorer:
        return self.scorers[0]

    def metric(self, name: str, **labels: str) -> float:
        """Without a connection, which the gateway may end."""
        return self.telemetry.registry.get_sample_value(f"outrider:{name}", labels) or 0.0


@asynccontextmanager
async def running_gateway(
    *scorers: FakeScorer | Script,
    exporter: SpanExporter | None = None,
    api_key: str = "unused",
    **config: Any,
) -> AsyncIterator[Running]:
    fakes = [s if isinstance(s, FakeScorer) else fake_scorer(s) for s in scorers]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            if not fake.target:
                await stack.enter_async_context(serving(fake))
        stack.enter_context(_hurried_uvicorn())
        telemetry = configure("test", exporter=exporter)
        gateway = Gateway(
            GatewayConfig(
                **{
                    "scorers": tuple(fake.target for fake in fakes),
                    "model": str(model_folder()),
                    "start_timeout_s": 5.0,
                    "request_timeout_s": 20.0,
                    "resume_timeout_s": 3.0,
                    "deployment": Deployment(drain_grace_s=0.5),
                    **config,
                }
            ),
            telemetry,
        )
        stack.push_async_callback(gateway.stop)
        addresses = await gateway.start()
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"{addresses['http']}/v1", api_key=api_key, max_retries=0)
        )
        yield Running(addresses["http"], addresses["grpc"], fakes, client, telemetry)
