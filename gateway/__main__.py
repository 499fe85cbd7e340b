"""`python -m gateway`: the only place that reads flags."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys

from gateway.config import GatewayConfig
from gateway.processes import Worker, die_with_parent
from gateway.workers.supervisor import Workers
from outrider.errors import ConfigError, refuse
from outrider.flag_types import RaisingParser
from outrider.process.signals import end_at_sigterm
from outrider.rpc.deployment import Help, add_deployment_flags, take_deployment
from outrider.rpc.runtime import GC_THRESHOLDS, importing, prepare_grpc, run
from outrider.rpc.targets import parse_entries
from outrider.settings import add_flag, settings_of


def main(argv: list[str] | None = None) -> int:
    """Run a gateway until a signal; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        flags = vars(_parser().parse_args(argv))
        exit_with_parent, worker = flags.pop("exit_with_parent"), flags["worker"]
        if worker is not None:
            die_with_parent(worker.parent)
        flags["scorers"] = parse_entries(flags.pop("scorer"))
        flags["served_model_name"], *others = flags["served_model_name"]
        flags["served_model_aliases"] = (*others, *flags["served_model_aliases"])
        flags["cors_origins"] = tuple(flags["cors_origins"])
        flags["deployment"] = take_deployment(flags)
        config = GatewayConfig(**flags)
    except ConfigError as error:
        return refuse("gateway", error)

    if config.workers > 1 and worker is None:
        end_at_sigterm()
        return run(
            "gateway",
            Workers(config, argv),
            exit_with_parent=exit_with_parent,
            new_loop=asyncio.new_event_loop,  # uvloop's children know no process groups
        )
    prepare_grpc()
    # Imported late: a wrong flag is answered at once.
    end_at_sigterm()
    try:
        with importing():
            from gateway.service import Gateway
            from outrider.rpc.telemetry import configure
        gc.set_threshold(*GC_THRESHOLDS)
    except KeyboardInterrupt:  # they take a second; afterwards the loop has the signal
        return 130
    return run(
        "gateway",
        Gateway(config, configure("outrider-gateway")),
        exit_with_parent=exit_with_parent,
    )


def _parser() -> RaisingParser:
    parser = RaisingParser(
        prog="outrider gateway",
        description="Serves clients over OpenAI-compatible HTTP and gRPC.",
        formatter_class=Help,
    )
    parser.add_argument(
        "--scorer",
        required=True,
        metavar="ADDRESS[,...]",
        help="the scorers: host:port, unix:/path, dns:host:port (all addresses of a name)",
    )
    for each in settings_of(GatewayConfig):
        add_flag(parser, each)
    parser.add_argument("--worker", type=Worker.parse, help=argparse.SUPPRESS)  # their parent's
    add_deployment_flags(parser)
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end when the starting process ends"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
