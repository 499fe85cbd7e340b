"""A scorer of two ranks: one text, one life. Each rank is started as if on a machine of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.ports import free_port
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from scorer_service.servicer import SERVICE_NAME
from tests.support.services.up import Up, addresses, service

pytestmark = pytest.mark.timeout(400)

GONE_S = 60.0  # a rank that is killed is noticed in seconds
FLAGS = ("--threads", "1", "--kv-cache-memory", "16")


@contextmanager
def two_ranks(model: Path, *follower_flags: object) -> Iterator[list[subprocess.Popen[str]]]:
    """Rank 0 and rank 1, killed at the end."""
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    argv = [sys.executable, "-m", "scorer_service", "--model", str(model), *FLAGS]
    ranks = [
        subprocess.Popen(
            [*argv, *map(str, follower_flags if rank else ())],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


async def is_serving(address: str) -> bool:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        answer = await stub.Check(request, timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_scorer_with_dead_rank_ends_and_request_goes_on_elsewhere(
    pair: tuple[Path, Path], draft_model_stack: Up
) -> None:
    health_port = free_port()
    one = draft_model_stack.services["scorer_service"]
    with ExitStack() as stack:
        ranks = stack.enter_context(two_ranks(pair[0], "--health-port", health_port))
        shared = addresses(ranks[0])["grpc"]
        assert await is_serving(f"127.0.0.1:{health_port}")
        whole = draft_model_stack.scorer
        os.kill(one, signal.SIGSTOP)  # so that the gateway begins with the ranks
        stack.callback(os.kill, one, signal.SIGCONT)
        gateway = stack.enter_context(
            service("gateway", "--scorer", f"{shared},{whole}", "--model", pair[0])
        )
        request = generation_pb2.GenerateRequest(
            text="def fibonacci(n):",
            sampling=common_pb2.SamplingParams(temperature=1.0, seed=5),
            stop=common_pb2.StopParams(max_tokens=100, ignore_eos=True),
            aux_info=True,
        )
        responses: list[generation_pb2.GenerateResponse] = []
        async with open_channel(addresses(gateway)["grpc"]) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            async for response in stub.Generate(request, timeout=100):
                responses.append(response)
                if len(responses) == 10:
                    os.kill(one, signal.SIGCONT)
                    ranks[1].kill()
            expected = [r async for r in stub.Generate(request, timeout=100)]
        assert responses[-1].aux_info.retries == 1
        assert expected[-1].aux_info.retries == 0
        resumed, at_once = (
            [t.id for r in each for t in r.tokens] for each in (responses, expected)
        )
        assert resumed == at_once
        assert len(at_once) == 100
        assert ranks[0].wait(GONE_S) == 1
        assert ranks[0].stderr is not None
        assert "this replica cannot go on: " in ranks[0].stderr.read()


def test_ranks_when_leader_is_stopped_end_together(pair: tuple[Path, Path]) -> None:
    with two_ranks(pair[0]) as ranks:
        addresses(ranks[0])
        ranks[1].terminate()  # as on a machine that is drained: that is for the leader to do
        with pytest.raises(subprocess.TimeoutExpired):
            ranks[1].wait(0.5)
        ranks[0].terminate()
        assert [rank.wait(GONE_S) for rank in ranks] == [0, 0]
