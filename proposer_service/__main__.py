"""Runs `python -m proposer_service --scorer HOST:PORT --method NAME[,...]`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from outrider.drafting.building.config import ModelConfig, check_files
from outrider.drafting.building.flags import add_method_flags, take_methods
from outrider.errors import OutriderError, refuse
from outrider.flag_types import RaisingParser
from outrider.process.signals import end_at_sigterm
from outrider.process.temporary import temporary_folder
from outrider.rpc.deployment import Help, add_deployment_flags, take_deployment
from outrider.rpc.targets import parse_entries
from outrider.settings import add_flag, settings_of
from proposer_service.config import ProposerConfig


def parse(argv: Sequence[str] | None = None) -> tuple[ProposerConfig, bool]:
    """Return the configuration, and whether to exit with the parent. Raises `ConfigError`."""
    parser = RaisingParser(
        prog="outrider proposer",
        description="Drafts tokens for Outrider scorers, which it dials.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add(
        "--scorer",
        required=True,
        metavar="ADDRESS[,...]",
        help="scorers to dial: host:port, unix:/path, dns:host:port (all addresses of a name)",
    )
    settings = settings_of(ProposerConfig)
    for each in settings:
        add_flag(parser, each)
    add_method_flags(parser, device="cpu")
    add_deployment_flags(parser)
    add("--exit-with-parent", action="store_true", help="stop when the parent process is gone")
    args = parser.parse_args(argv)
    config = ProposerConfig(
        scorers=parse_entries(args.scorer),
        methods=take_methods(args),
        deployment=take_deployment(vars(args)),
        **{each.name: getattr(args, each.name) for each in settings},
    )
    return config, args.exit_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal, and return the exit code."""
    try:
        config, exit_with_parent = parse(argv)
        for method in config.methods:
            if isinstance(method, ModelConfig):
                temporary_folder()
                # NumPy and torch read them when they are loaded, by the checks and below.
                for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
                    os.environ[variable] = str(method.threads)
        check_files(config.methods)
    except OutriderError as error:
        return refuse("proposer", error)
    # Time for which the drafting thread, which drafts ahead, may keep the event loop from passing
    # messages of gRPC. Python's default of 5 ms is as long as a step takes on a GPU.
    sys.setswitchinterval(0.0001)
    end_at_sigterm()
    try:
        from outrider.rpc import runtime

        runtime.prepare_grpc()
        with runtime.importing():
            from proposer_service.service import ProposerService
        gc.set_threshold(*runtime.GC_THRESHOLDS)
    except KeyboardInterrupt:  # it takes a second; afterwards the loop has the signal
        return 130
    return runtime.run("proposer", ProposerService(config), exit_with_parent=exit_with_parent)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing down an interpreter with torch in it takes a second.
    os._exit(exit_code)
