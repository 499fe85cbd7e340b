"""A gRPC client that keeps a number of requests in flight at a scorer or a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from benchmarks.lib.processes import ProcessError
from benchmarks.lib.records import Completion, TokenIds
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, scorer_pb2
from outrider.v1.scorer_pb2_grpc import ScorerServiceStub

_RPC_TIMEOUT_S: Final = 10.0
_STATS: Final = (
    *("rounds", "drafted", "accepted", "hits", "misses_late", "misses_wrong"),
    *("wait_ms", "propose_ms", "score_ms", "network_ms"),
)


@dataclass(frozen=True)
class Job:
    """One request. End-of-sequence is ignored, so it yields `max_tokens`."""

    prompt: TokenIds
    max_tokens: int
    method: str = "none"  # no speculation, or a method of the stack
    temperature: float = 0.0
    seed: int | None = None


class Client:
    """Channels to a scorer and a gateway."""

    def __init__(self, scorer: str, gateway: str) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(self._connect(scorer, gateway))

    def close(self) -> None:
        self._runner.run(self._disconnect())
        self._runner.close()

    def info(self) -> scorer_pb2.GetScorerInfoResponse:
        """Return the scorer's description of itself and its proposers."""
        return self._runner.run(self._info())

    def generate(
        self,
        jobs: Sequence[Job],
        concurrency: int,
        *,
        timeout_s: float,
    ) -> tuple[tuple[Completion, ...], float]:
        """Run all jobs with `concurrency` in flight; return completions and seconds."""

        async def run() -> tuple[tuple[Completion, ...], float]:
            slots = asyncio.Semaphore(concurrency)

            async def one(job: Job) -> Completion:
                async with slots:
                    return await _consume(self._call(job, timeout_s))

            start = time.perf_counter()
            completions = await asyncio.gather(*map(one, jobs))
            return tuple(completions), time.perf_counter() - start

        return self._runner.run(run())

    def _call(self, job: Job, timeout_s: float) -> AsyncIterable[generation_pb2.GenerateResponse]:
        request = generation_pb2.GenerateRequest(
            tokens=generation_pb2.TokenPrompt(token_ids=job.prompt),
            sampling=common_pb2.SamplingParams(temperature=job.temperature, seed=job.seed),
            stop=common_pb2.StopParams(max_tokens=job.max_tokens, ignore_eos=True),
            speculation=common_pb2.SpeculationParams(
                enabled=job.method != "none", method=job.method
            ),
            aux_info=True,
        )
        return self._gateway.Generate(request, timeout=timeout_s)

    async def _connect(self, scorer: str, gateway: str) -> None:
        self._channels = [open_channel(scorer), open_channel(gateway)]
        self._scorer = ScorerServiceStub(self._channels[0])
        self._gateway = generation_pb2_grpc.GenerationServiceStub(self._channels[1])

    async def _disconnect(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _info(self) -> scorer_pb2.GetScorerInfoResponse:
        info: scorer_pb2.GetScorerInfoResponse = await self._scorer.GetScorerInfo(
            scorer_pb2.GetScorerInfoRequest(), timeout=_RPC_TIMEOUT_S
        )
        return info


async def _consume(stream: AsyncIterable[generation_pb2.GenerateResponse]) -> Completion:
    start = time.perf_counter()
    token_ids: list[int] = []
    arrivals: list[float] = []
    aux = common_pb2.AuxInfo()
    async for message in stream:
        if message.tokens:
            token_ids += [token.id for token in message.tokens]
            arrivals.append(time.perf_counter())
        if message.HasField("aux_info"):
            aux = message.aux_info
    total_s = time.perf_counter() - start
    if not arrivals or not aux.output_len:
        raise ProcessError("a request ended without tokens or without aux_info")
    return Completion(
        tuple(token_ids),
        total_s,
        ttft_s=arrivals[0] - start,
        stats={name: float(getattr(aux, name)) for name in _STATS}
        | {"undrafted_rounds": float(aux.k_histogram[0] if aux.k_histogram else aux.rounds)},
        accepted_per_pos=tuple(aux.accepted_per_pos),
        round_gaps_s=tuple(b - a for a, b in pairwise(arrivals)),
    )
