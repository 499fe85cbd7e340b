"""`outrider serve MODEL`: everything that one model needs on this machine, kept running."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial

from outrider.cli.ports import check_port, memory_folder
from outrider.cli.process import relay, run_until_signal
from outrider.cli.serve_config import take_config
from outrider.cli.serve_flags import in_own_flags
from outrider.cli.services import SOCKET, ServeConfig, services
from outrider.cli.stack import Stack
from outrider.errors import ConfigError, say
from outrider.flag_types import MAX_SOCKET_PATH
from outrider.process.temporary import run_folder, temporary_folder

tell = partial(relay, "outrider")
"""Shows a line of the command's own on stderr."""


def run_serve(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the one line on stdout says where."""
    for port, flag in ((args.port, "--port"), (args.grpc_port, "--grpc-port")):
        if not args.dry_run:
            check_port(args.host, port, flag)
    config = take_config(
        args, tell, dry=args.dry_run, host=args.host, http_port=args.port, grpc_port=args.grpc_port
    )
    if args.dry_run:
        for spec in services(config, f"{memory_folder() or temporary_folder()}/outrider"):
            print(f"{spec.name}: {spec}")
        return 0
    return run_until_signal(_serve(config))


@contextlib.contextmanager
def stack_of(config: ServeConfig) -> Iterator[Stack]:
    """Yield the stack that serves this, to be entered; its socket's folder goes with it.

    Raises `ConfigError` where no folder can be made, or its path is too long for sockets.
    """
    with contextlib.ExitStack() as kept:
        folder = _folder(kept)
        surplus = len(os.fsencode(f"{folder}/{SOCKET}")) - MAX_SOCKET_PATH
        if surplus > 0:
            most = len(os.fsencode(os.path.dirname(folder))) - surplus
            raise ConfigError(
                f"the path of sockets in {folder} is too long: let TMPDIR name a folder of at most "
                f"{most} bytes."
            )
        try:
            yield Stack(services(config, folder), relay)
        except ConfigError as error:
            raise ConfigError(in_own_flags(error.message)) from error


def _folder(kept: contextlib.ExitStack) -> str:
    """Make a folder for sockets, in memory if that works, until the stack is left."""
    if (in_memory := memory_folder()) is not None:
        with contextlib.suppress(OSError):
            return kept.enter_context(run_folder(in_memory))
    parent = temporary_folder()
    try:
        return kept.enter_context(run_folder(parent))
    except OSError as error:
        raise ConfigError(f"no folder can be made in {parent}: {error.strerror}.") from error


async def _serve(config: ServeConfig) -> int:
    with stack_of(config) as waiting:
        async with waiting as stack:
            await stack.wait_for_proposer()
            for name, said in stack.ready.items():
                if "metrics" in said:
                    tell(f"metrics of the {name}: {said['metrics']}")
            tell(f"metrics of the gateway: {stack.ready['gateway']['http']}/metrics")
            if "--no-playground" not in config.flags.get("gateway", ()):
                tell(f"a page to try it: {stack.ready['gateway']['http']}/")
            say(ready_line(config, stack.ready), sys.stdout)
            try:
                await stack.supervise()
            except asyncio.CancelledError:  # a signal is how serving is meant to end
                return 0


def ready_line(config: ServeConfig, ready: Mapping[str, Mapping[str, str]]) -> str:
    """Return the line that says where which model is served, and how."""
    gateway, scorer = ready["gateway"], ready["scorer"]
    drafted = ",".join(config.methods) or "none"
    where = f" on {config.draft_device}" if config.draft_device and config.methods else ""
    return (
        f"ready {gateway['http']} grpc://{gateway['grpc']} model={config.served_model_name} "
        f"engine={config.engine} {config.dtype} on {config.device}, method={drafted}{where}, "
        f"context={scorer['context']} cache={scorer['cache']} tokens"
    )
