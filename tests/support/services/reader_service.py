"""A proposer service around a method that a test holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.drafting.building.config import NgramConfig
from outrider.drafting.proposer import Proposer
from outrider.rpc.deployment import Deployment, TlsFiles
from outrider.rpc.telemetry import configure
from proposer_service.config import LinkConfig, ProposerConfig
from proposer_service.service import ProposerService
from tests.support.services.scorer import TOKENIZER_HASH


@asynccontextmanager
async def serving(
    scorer: str, method: Proposer, tls: TlsFiles | None = None
) -> AsyncIterator[dict[str, str]]:
    """Dials `scorer` all the while; yields its own addresses."""
    config = ProposerConfig(
        scorers=(scorer,),
        methods=(NgramConfig(),),  # `method` is built instead
        proposer_id="reader",
        link=LinkConfig(backoff_first_s=0.01, backoff_max_s=0.1, refused_retry_s=0.2),
        deployment=Deployment(drain_grace_s=0.02, tls=tls),
    )
    service = ProposerService(config, lambda _: (method, TOKENIZER_HASH), configure("proposer"))
    try:
        yield await service.start()
    finally:
        await service.stop()
