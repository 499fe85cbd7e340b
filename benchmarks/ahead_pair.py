"""A scorer, the delay proxy and a proposer as processes, asked for tokens directly."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.processes import Child, ProcessError, python_path
from benchmarks.lib.records import TokenIds
from outrider.cli.specs import HOST
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, scorer_pb2
from outrider.v1.scorer_pb2_grpc import ScorerServiceStub

_SUMMED = (
    *("rounds", "drafted", "accepted", "hits", "misses_late", "misses_wrong", "propose_ms"),
    *("rounds_after_hit", "hits_after_hit", "rounds_after_miss", "hits_after_miss"),
)


@dataclass(frozen=True)
class PairConfig:
    """What to start; `slow_*` ms slow a model down, and only then CPUs are to be used."""

    scorer: tuple[str, ...]
    proposer: tuple[str, ...]
    scorer_gpu: str | None
    proposer_gpu: str | None
    max_branches: int
    timeout_s: float

    @staticmethod
    def from_args(args: argparse.Namespace) -> PairConfig:
        """From the flags of draft_ahead.py."""
        scorer, proposer = ["-m", "scorer_service"], ["-m", "proposer_service"]
        if args.simulated:
            slowed = ["-m", "benchmarks.slowed"]
            scorer = [*slowed, "scorer", "--forward-ms", str(args.step_ms)]
            proposer = [*slowed, "proposer", "--forward-ms", str(args.draft_step_ms)]
        device = ["--device", args.device]
        scorer += ["--model", args.model, "--dtype", args.dtype, *device]
        scorer += ["--num-speculative-tokens", str(args.num_speculative_tokens)]
        scorer += ["--max-num-seqs", str(max(args.batch)), "--no-enable-prefix-caching"]
        proposer += ["--model", args.draft_model, "--dtype", args.draft_dtype, *device]
        proposer += ["--max-draft-tokens", str(args.num_speculative_tokens)]
        proposer += ["--max-sessions", str(max(args.batch))]
        return PairConfig(
            scorer=(*scorer, *shlex.split(args.scorer_flags)),
            proposer=(*proposer, *shlex.split(args.proposer_flags)),
            scorer_gpu=args.scorer_gpu,
            proposer_gpu=args.proposer_gpu,
            max_branches=args.max_branches,
            timeout_s=args.timeout,
        )


@dataclass(frozen=True)
class Load:
    """Requests of which `in_flight` run at a time: the next begins when one ends."""

    prompts: tuple[TokenIds, ...]
    in_flight: int
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class Sample:
    """The same prompts without speculation, then with it."""

    tokens_per_s: float
    plain_tokens_per_s: float
    aux: dict[str, float]  # sums over the requests with speculation
    bytes_to: int  # through the proxy, from the proposer to the scorer
    bytes_from: int
    num_equal: int
    num_texts: int


class Pair:
    """An async context: the scorer and the proxy run within it, a proposer within `proposer`."""

    def __init__(self, config: PairConfig, children: list[Child], log_dir: Path) -> None:
        self._config = config
        self._children = children
        self._log_dir = log_dir

    async def __aenter__(self) -> Pair:
        timeout_s = self._config.timeout_s
        ready = self._start("scorer", [*self._config.scorer], "scorer_gpu").ready(timeout_s)
        self._scorer_at = ready["grpc"]
        targets = ("--target", ready["grpc"], "--target", ready["data"])
        self._proxy = self._start("proxy", ["-m", "benchmarks.lib.delay_proxy", *targets], None)
        self._proxy_at = self._proxy.ready(timeout_s)["address"]
        self._channel = open_channel(self._scorer_at)
        self._stub = ScorerServiceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    @contextlib.asynccontextmanager
    async def proposer(self, mode: str, *, proxied: bool) -> AsyncIterator[None]:
        """A proposer of `mode` (draft_ahead.py) is attached within this context."""
        config = self._config
        target = self._proxy_at if proxied else self._scorer_at
        branches = config.max_branches if mode == "ahead" else 0
        command = [*config.proposer, "--scorer", target, "--max-branches", str(branches)]
        gpu = "scorer_gpu" if mode == "colocated" else "proposer_gpu"
        child = self._start(f"proposer-{mode}", command, gpu)
        child.ready(config.timeout_s)
        await self._until_attached(1)
        try:
            yield
        finally:
            child.stop()
            self._children.remove(child)
            await self._until_attached(0)

    def set_round_trip(self, milliseconds: float) -> None:
        """What the proxy adds to the way there and back of what goes through it."""
        self._tell_proxy({"delay_s": milliseconds / 2e3})

    async def rehearse(self, load: Load) -> None:
        """Run `load` with speculation, unmeasured: kernels are compiled, a policy learns."""
        await self._run(load, speculate=True)

    async def sample(self, load: Load) -> Sample:
        """`load` without speculation and with it."""
        plain, plain_s, _ = await self._run(load, speculate=False)
        before = self._tell_proxy({})
        texts, seconds, aux = await self._run(load, speculate=True)
        after = self._tell_proxy({})
        if not aux["drafted"] and load.in_flight == 1:
            raise ProcessError("nothing was drafted; the proposer does not work")
        num_tokens = sum(map(len, texts))
        return Sample(
            tokens_per_s=num_tokens / seconds,
            plain_tokens_per_s=num_tokens / plain_s,
            aux=aux,
            bytes_to=after["to"] - before["to"],
            bytes_from=after["from"] - before["from"],
            num_equal=sum(a == b for a, b in zip(plain, texts, strict=True)),
            num_texts=len(texts),
        )

    async def _run(
        self, load: Load, *, speculate: bool
    ) -> tuple[list[list[int]], float, dict[str, float]]:
        slots = asyncio.Semaphore(load.in_flight)

        async def one(seed: int, prompt: TokenIds) -> tuple[list[int], common_pb2.AuxInfo]:
            async with slots:
                return await self._generate(prompt, load, seed, speculate)

        started = time.perf_counter()
        answers = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(load.prompts)))
        seconds = time.perf_counter() - started
        aux = {name: sum(float(getattr(a, name)) for _, a in answers) for name in _SUMMED}
        undrafted = sum(a.k_histogram[0] if a.k_histogram else 0 for _, a in answers)
        return [text for text, _ in answers], seconds, aux | {"undrafted_rounds": undrafted}

    async def _generate(
        self, prompt: TokenIds, load: Load, seed: int, speculate: bool
    ) -> tuple[list[int], common_pb2.AuxInfo]:
        text: list[int] = []
        aux = common_pb2.AuxInfo()
        async for message in self._stub.Generate(
            scorer_pb2.ScorerServiceGenerateRequest(
                prompt_token_ids=prompt,
                sampling=common_pb2.SamplingParams(temperature=load.temperature, seed=seed),
                stop=common_pb2.StopParams(max_tokens=load.max_tokens, ignore_eos=True),
                speculation=common_pb2.SpeculationParams(enabled=speculate),
            ),
            timeout=self._config.timeout_s,
        ):
            text += message.token_ids
            if message.HasField("aux_info"):
                aux = message.aux_info
        return text, aux

    async def _until_attached(self, wanted: int) -> None:
        deadline = time.monotonic() + self._config.timeout_s
        while True:
            info = await self._stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=10)
            if len(info.proposers) == wanted:
                return
            if time.monotonic() > deadline:
                raise ProcessError(f"{len(info.proposers)} proposers attached, wanted {wanted}")
            await asyncio.sleep(0.1)

    def _tell_proxy(self, fields: dict[str, float]) -> dict[str, int]:
        self._proxy.write(json.dumps(fields))
        answer: dict[str, int] = json.loads(self._proxy.line(10.0))
        return answer

    def _start(self, name: str, command: Sequence[str], gpu: str | None) -> Child:
        extra = [] if gpu is None else ["--host", HOST, "--exit-with-parent"]
        device = getattr(self._config, gpu) if gpu is not None else None
        env = python_path()
        if device is not None:
            env["CUDA_VISIBLE_DEVICES"] = device
        child = Child(name, [sys.executable, "-P", *command, *extra], self._log_dir, env=env)
        self._children.append(child)
        return child
