"""Restarting and scaling pools under load, with the processes that the chart's pods would run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from outrider.v1 import scorer_pb2
from tests.support.kubernetes.pods import Cluster, Pod, cluster
from tests.support.services.options import GenerateOptions
from tests.support.services.up import Completion, complete
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

DRAIN = ("--drain-grace-seconds=0",)
"""Of scorers: shorter than any request, so that what runs on a drained one goes on elsewhere."""
REQUESTS = tuple(
    GenerateOptions(
        prompt=f"def f{n}(x):",
        seed=n,
        temperature=(0.0, 0.9)[n % 2],
        max_tokens=240,
        ignore_eos=True,
        aux_info=True,
        methods=((), ("draft_model",), ("ngram",))[n % 3],
    )
    for n in range(18)  # so many that each scorer is the first choice for some
)


@dataclass
class Load:
    """Clients that ask without a pause, and check every answer against plain decoding."""

    gateways: list[Pod]  # the service's endpoints
    done: list[Completion] = field(default_factory=list)
    retries: int = 0
    """Of all requests, also those for plain decoding: whichever a scorer has when it ends."""
    _expected: dict[GenerateOptions, asyncio.Task[Completion]] = field(default_factory=dict)
    _stopping: bool = False

    async def ask(self, options: GenerateOptions) -> Completion:
        """An answer that says what plain decoding says."""
        plain = replace(options, speculation=False)
        if options not in self._expected:
            self._expected[options] = asyncio.create_task(self._complete(plain))
        expected, answer = await asyncio.gather(self._expected[options], self._complete(options))
        assert answer.text == expected.text
        return answer

    async def ask_draft(self) -> Completion:
        """The answer to a request that only a draft model may draft for."""
        return await self.ask(next(r for r in REQUESTS if r.methods == ("draft_model",)))

    async def _complete(self, options: GenerateOptions) -> Completion:
        answer = await complete(f"{self.gateways[-1].ip}:50051", options, timeout_s=120)
        self.retries += answer.aux.retries
        return answer

    async def client(self, first: int) -> None:
        for number in itertools.count(first):
            if self._stopping:
                return
            options = REQUESTS[number % len(REQUESTS)]
            self.done.append(await self.ask(options))

    async def more(self) -> None:
        """Returns when two more requests have been answered."""
        enough = len(self.done) + 2
        await until(lambda: len(self.done) >= enough, timeout_s=120)

    @asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        """A client that gets an error, or another text, ends the body."""
        async with asyncio.TaskGroup() as group:
            for n in range(clients):
                group.create_task(self.client(n * len(REQUESTS) // clients))
            await self.more()
            yield
            await self.more()
            self._stopping = True


@dataclass
class Release:
    """Two scorers, a gateway, and what else a test starts."""

    pods: Cluster
    scorers: list[Pod]
    gateways: list[Pod]

    async def stop_scorer(self, number: int, load: Load) -> None:
        """Ends it while it has requests."""
        await self.until(self.scorers[number], lambda info: info.running_requests > 0)
        await self.scorers[number].terminate()
        await load.more()

    async def restart_scorer(self, number: int, load: Load) -> None:
        """As a StatefulSet does: the old pod ends before the new one begins."""
        await self.stop_scorer(number, load)
        self.scorers[number] = self.pods.start("scorer", self.scorers[number].ip, DRAIN)
        await self.scorers[number].until_ready()
        await load.more()

    async def restart_pool(self, old: Pod, load: Load) -> Pod:
        """As a Deployment does: the new pod is ready before the old one ends."""
        new = self.pods.start(old.template.name)
        await self.until_attached(new)
        await old.terminate()
        await load.more()
        return new

    async def restart_gateway(self, load: Load) -> None:
        new = self.pods.start("gateway")
        await new.until_ready()
        old, load.gateways[:] = load.gateways[0], [new]  # out of the endpoints before SIGTERM
        await old.terminate()
        await load.more()

    async def until_attached(self, *proposers: Pod) -> None:
        """Returns when each is ready and every scorer knows it."""
        for pod in proposers:
            await pod.until_ready()
        names = {pod.name for pod in proposers}
        for scorer in self.scorers:
            await self.until(
                scorer, lambda info: names <= {proposer.proposer_id for proposer in info.proposers}
            )

    async def until(
        self, scorer: Pod, condition: Callable[[scorer_pb2.GetScorerInfoResponse], bool]
    ) -> None:
        """Polls what the scorer says about itself."""
        async with asyncio.timeout(120):
            while not condition(await self.pods.scorer_info(scorer)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def release(pair: tuple[Path, Path], folder: Path, *pools: str) -> AsyncIterator[Release]:
    """Ready, with one proposer in each of `pools`; it knows what plain decoding says."""
    async with cluster(folder, *pair, scorers=2) as pods:
        scorers = [pods.start("scorer", ip, DRAIN) for ip in pods.scorer_ips]
        gateway = pods.start("gateway")
        proposers = [pods.start(pool) for pool in pools]
        for pod in pods.pods:
            await pod.until_ready()
        started = Release(pods, scorers, [gateway])
        await started.until_attached(*proposers)
        yield started


async def test_pods_that_leave_under_load_lose_no_request(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """The half of the long tests below that costs no further starts."""
    async with release(pair, tmp_path, "draft") as running:
        load = Load(running.gateways)
        assert (await load.ask_draft()).aux.accepted > 0
        async with load.running(clients=2):
            running.pods.renew_certificates()
            await running.stop_scorer(1, load)
            await running.pods.pods[-1].terminate()
            assert (await load.ask_draft()).aux.drafted == 0
    assert load.retries > 0, "a request moved to another scorer"


@pytest.mark.slow
async def test_rolling_restart_under_load_loses_no_request_and_keeps_text(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    async with release(pair, tmp_path, "draft", "lookup") as running:
        draft, lookup = running.pods.pods[-2:]
        load = Load(running.gateways)
        async with load.running(clients=4):
            running.pods.renew_certificates()
            for number in range(2):
                await running.restart_scorer(number, load)
            for pod in (draft, lookup):
                await running.restart_pool(pod, load)
            await running.restart_gateway(load)
    assert load.retries > 0, "a request moved to another scorer"
    assert sum(done.aux.accepted for done in load.done) > 0


@pytest.mark.slow
async def test_draft_pool_when_scaled_keeps_text(pair: tuple[Path, Path], tmp_path: Path) -> None:
    async with release(pair, tmp_path, "lookup") as running:
        load = Load(running.gateways)
        async with load.running(clients=2):
            assert (await load.ask_draft()).aux.drafted == 0
            pool = [running.pods.start("draft") for _ in range(2)]
            await running.until_attached(*pool)
            assert (await load.ask_draft()).aux.accepted > 0
            await asyncio.gather(*(pod.terminate() for pod in pool))
            assert (await load.ask_draft()).aux.drafted == 0
