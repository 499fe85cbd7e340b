"""`outrider up`: the whole stack, kept running."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine

from outrider.cli.flag_types import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from outrider.cli.specs import StackConfig
from outrider.cli.stack import Stack


def run_up(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the one line on stdout says where."""
    return run_until_signal(_up(args))


async def _up(args: argparse.Namespace) -> int:
    config = stack_config(
        args,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        served_model_name=args.served_model_name,
    )
    async with Stack(config, relay) as stack:
        await stack.wait_for_proposer()
        endpoints = stack.endpoints
        for name, url in endpoints.metrics.items():
            relay("outrider", f"metrics of the {name}: {url}")
        relay("outrider", f"metrics of the gateway: {endpoints.http}/metrics")
        print(f"ready {endpoints.http} grpc://{endpoints.grpc}", flush=True)
        await stack.supervise()


def stack_config(
    args: argparse.Namespace,
    *,
    http_port: int | None = 0,
    grpc_port: int | None = 0,
    served_model_name: str = "default",
) -> StackConfig:
    """Read the flags that `up` and `demo` share, "auto" resolved. Raises `ConfigError`.

    A port that is `None` is the default one if it is free, else any.
    """
    model = None if args.model == "embedded" else args.model
    draft_model = None if args.draft_model == "embedded" else args.draft_model
    methods = args.method
    if methods is None:
        methods = ("ngram",) if model is not None and draft_model is None else ("draft_model",)
        if methods == ("ngram",):
            relay("outrider", "no --draft-model: drafting by prompt lookup (--method ngram)")
    defaults = {DEFAULT_HTTP_PORT: http_port, DEFAULT_GRPC_PORT: grpc_port}
    return StackConfig(
        http_port=DEFAULT_HTTP_PORT if http_port is None else http_port,
        grpc_port=DEFAULT_GRPC_PORT if grpc_port is None else grpc_port,
        unasked_ports=frozenset(port for port, asked in defaults.items() if asked is None),
        model=model,
        draft_model=draft_model,
        methods=methods,
        in_process=args.in_process,
        num_speculative_tokens=args.num_speculative_tokens,
        speculation_policy=args.speculation_policy,
        dtype=args.dtype,
        seed=args.seed,
        served_model_name=served_model_name,
    )


def relay(name: str, line: str) -> None:
    """Show one line of a service on stderr."""
    line = line.removeprefix(name).removeprefix(":").lstrip()  # it says its name itself
    print(f"{name:<8} | {line}", file=sys.stderr, flush=True)


def run_until_signal(command: Coroutine[object, object, int]) -> int:
    """Run a command; SIGINT, SIGTERM and SIGHUP cancel it, which stops what it started.

    Returns its exit code, or 0 if a signal ended it: that is how these commands are stopped.
    """

    async def body() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(command)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return 0

    return asyncio.run(body())
