"""A scorer whose forward never returns answers its requests, says so and ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
import pytest
from torch import Tensor

from outrider.config import EngineConfig
from outrider.engine.batch import PackedBatch
from outrider.engine.engine import Engine
from outrider.process import watchdog
from outrider.rpc.channel import open_channel
from outrider.v1 import scorer_pb2_grpc
from scorer_service import app, core
from scorer_service.__main__ import resolve
from scorer_service.config import ScorerOptions
from tests.support.models.hash_model import HashModel
from tests.support.services.scorer import generate_request


class HangingModel(HashModel):
    """Its forwards do not return before they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()

    def forward(self, batch: PackedBatch) -> Tensor:
        assert self.back.wait(60)
        return super().forward(batch)


async def generate(stub: scorer_pb2_grpc.ScorerServiceAsyncStub) -> None:
    """A request without a deadline of its own."""
    async for _ in stub.Generate(generate_request([1, 2, 3])):
        pass


async def test_scorer_when_forward_hangs_ends_with_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.2)
    model = HangingModel()
    config = EngineConfig(page_size=4, num_pages=64, max_model_len=64)
    monkeypatch.setattr(core, "build_engine", lambda *_: Engine(model, config))
    monkeypatch.setattr(core, "check_config", lambda _: None)  # there is no checkpoint
    (tmp_path / "config.json").write_text("{}")
    flags = resolve([f"--model={tmp_path}", "--drain-grace-seconds=60"])
    del flags["exit_with_parent"]
    scorer = app.ScorerApp(ScorerOptions(**flags))
    try:
        async with asyncio.timeout(20):
            addresses = await scorer.start()
            async with open_channel(addresses["grpc"]) as channel:
                running = asyncio.create_task(generate(scorer_pb2_grpc.ScorerServiceStub(channel)))
                await scorer.wait_failed()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await running
            await scorer.stop()  # without waiting for the step, or for the grace
    finally:
        model.back.set()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "gateways go on elsewhere"
    assert "the engine thread hangs" in caplog.text
