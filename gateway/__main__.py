"""`python -m gateway`: the only place that reads flags."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import sys

from gateway.config import GatewayConfig
from gateway.processes import Worker, default_workers, die_with_parent
from gateway.workers.supervisor import Workers
from outrider.errors import ConfigError, refuse
from outrider.flag_types import RaisingParser, port, some_text
from outrider.rpc.deployment import Help, add_deployment_flags, take_deployment
from outrider.rpc.runtime import importing, prepare_grpc, run
from outrider.rpc.targets import parse_entries
from outrider.signals import end_at_sigterm

_GC_THRESHOLDS = (50_000, 10, 10)
"""Streams make and drop thousands of objects a step, hardly any in reference cycles. With Python's
default thresholds, looking for cycles takes a seventh of a gateway's time."""
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GatewayConfig)}


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
        gc.set_threshold(*_GC_THRESHOLDS)
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
    for name, kind, text in (
        ("model", str, "the scorers' --model, for its tokenizer; unset: embedded"),
        ("host", some_text, "address to listen on"),
        ("http_port", port, "0: any free port"),
        ("grpc_port", port, "0: any free port"),
        ("metrics_port", port, "/metrics; 0: any free port; unset: on the HTTP port"),
        ("api_key_file", str, "one key per line; without it, anyone may ask"),
        ("max_in_flight", int, "completions at once; more get 429"),
        ("max_body_bytes", int, "larger requests get 413, over gRPC RESOURCE_EXHAUSTED"),
        ("default_max_tokens", int, "for requests that set none; unset: what the context holds"),
        ("seed", int, "for requests that give none; unset: a new one for each"),
        ("tool_call_parser", str, "format of tool calls; auto: as the chat template shows"),
        ("reasoning_parser", str, "format of reasoning; auto: likewise; none: there is none"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=_DEFAULTS[name], help=text
        )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[_DEFAULTS["served_model_name"]],
        metavar="NAME",
        help="the names clients ask for; metrics and traces carry the first",
    )
    parser.add_argument(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's origin that may call the HTTP API from a browser, such as "
        "https://app.example.com, or * for any; may be given several times; unset: none",
    )
    parser.add_argument(
        "--served-model-alias",
        dest="served_model_aliases",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of the served model; may be given several times; unset: none",
    )
    parser.add_argument(
        "--vllm-metrics",
        action="store_true",
        help="the scorers' load under vLLM's metric names, at /metrics of the HTTP port, too",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=default_workers(),
        help="processes that serve on the ports together, each with a core of its own; unset: one "
        "for every four cores, at most four",
    )
    parser.add_argument("--worker", type=Worker.parse, help=argparse.SUPPRESS)  # their parent's
    parser.add_argument(
        "--no-playground",
        dest="playground",
        action="store_false",
        default=argparse.SUPPRESS,
        help="answer / with 404 instead of a page to try the model on",
    )
    for name, text in (
        ("request_timeout", "every request is answered within this time"),
        ("resume_timeout", "how long a request waits for a scorer to continue on"),
        (
            "hold_timeout",
            "how long a new request waits while no scorer serves, where scorers are "
            "scaled to zero: health then needs none; unset: --resume-timeout, and it does",
        ),
        ("start_timeout", "how long the start waits for a scorer"),
        ("dns_refresh_seconds", "how often the names in --scorer are looked up"),
    ):
        field = f"{name.removesuffix('_seconds')}_s"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=field,
            type=float,
            metavar="SECONDS",
            default=_DEFAULTS[field],
            help=text,
        )
    add_deployment_flags(parser)
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end when the starting process ends"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
