"""Runs `python -m scorer_service`, which serves one model replica. See --help."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from outrider import engines, flag_types, start_times
from outrider.config import KV_CACHE_DTYPES, THREAD_SWITCH_S, acceptance_rates
from outrider.drafting.building.config import check_files
from outrider.errors import ConfigError, refuse
from outrider.models.local_files import check_target
from outrider.models.resolve import find_local, resolve_model
from outrider.process.signals import end_at_sigterm
from outrider.process.temporary import temporary_folder
from outrider.rpc.deployment import Help, add_deployment_flags, take_deployment
from outrider.settings import add_flag, settings_of
from outrider.vllm.flags import (
    add_parallel_flags,
    gives_speculation,
    node_rank,
    num_devices,
    take_parallel_flags,
)
from scorer_service import prefetch
from scorer_service.config import ScorerOptions

_DEFAULTS: dict[str, dict[str, int | None]] = {
    "cpu": {"max_num_batched_tokens": 512, "kv_cache_memory": 512, "page_size": 16},
    "cuda": {"max_num_batched_tokens": 2048, "kv_cache_memory": None, "page_size": 64},
}
_VLLM_DEFAULTS: dict[str, int | None] = {"max_num_batched_tokens": 0, "page_size": 0}


def parser() -> flag_types.RaisingParser:
    """Return a parser of the flags."""
    p = flag_types.RaisingParser(
        prog="outrider scorer",
        description="Verifies drafts for one model replica; owns its committed tokens. With "
        "--engine vllm, flags of vLLM itself may follow after --.",
        formatter_class=Help,
    )
    for each in settings_of(ScorerOptions):
        add_flag(p, each)
    add_parallel_flags(p)
    p.add_argument(
        "--synthetic-acceptance-length",
        type=float,
        metavar="L",
        help="the same by the mean tokens of a round, the model's own included: from 1 to K + 1",
    )
    add_deployment_flags(p)
    p.add_argument(
        "--exit-with-parent", action="store_true", help="stop when the parent process is gone"
    )
    return p


def resolve(argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the flags' values, with those filled in that depend on the device or the process.

    Raises `ConfigError`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    own = words[: words.index("--")] if "--" in words else words
    args = vars(parser().parse_args(own))
    args["deployment"] = take_deployment(args)
    args["scorer_id"] = args["scorer_id"] or f"{socket.gethostname()}-{os.getpid()}"
    args["vllm_flags"] = (*take_parallel_flags(args), *words[len(own) + 1 :])
    args["engine"] = _engine(args)
    defaults = _DEFAULTS["cuda" if args["device"].startswith("cuda") else "cpu"]
    if args["engine"] == engines.VLLM:
        defaults = defaults | _VLLM_DEFAULTS
    elif args["max_num_batched_tokens"] is None:
        least = defaults["max_num_batched_tokens"] or 0
        args["max_num_batched_tokens"] = max(least, args["max_num_seqs"])
    for name, value in defaults.items():
        args[name] = value if args[name] is None else args[name]
    tokens, rows = args["max_num_batched_tokens"], args["max_num_seqs"]
    if tokens < rows and args["engine"] == engines.NATIVE:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is less than one token for each of the requests of "
            f"a batch: raise it to {rows} at least, or lower --max-num-seqs {rows}."
        )
    args["synthetic_acceptance_rates"] = acceptance_rates(
        args["synthetic_acceptance_rates"],
        args.pop("synthetic_acceptance_length"),
        args["num_speculative_tokens"],
    )
    flags, args["in_process_proposer"] = args["in_process_proposer"], ()
    if flags is not None and args["num_speculative_tokens"]:
        os.environ["OMP_NUM_THREADS"] = str(args["threads"])  # the import below loads NumPy
        from scorer_service.drafting.in_process_flags import states_of, take

        args["in_process_proposer"] = methods = take(flags, args["model"], args["device"])
        args["hidden_features"] = args["hidden_features"] or states_of(methods)
        args["proposer_flags"] = flags
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal, and return the exit code."""
    try:
        with start_times.phase("imports"):  # of what the checks need
            args = resolve(argv)
            temporary_folder()
            # NumPy and torch read it when they are loaded, by the checks and below.
            os.environ["OMP_NUM_THREADS"] = str(args["threads"])
            if args["engine"] == engines.NATIVE:
                prefetch.begin(args["model"], args["device"])
                check_target(args["model"])
            check_files(args["in_process_proposer"])
        exit_with_parent = args.pop("exit_with_parent")
        if node_rank(args["vllm_flags"]) and args["engine"] == engines.VLLM:
            _follow(args)
    except ConfigError as error:
        return refuse("scorer", error)
    # Rounds for which an idle OpenMP thread spins. libgomp's default of 300,000 costs a time slice
    # at every barrier where other processes want the cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    sys.setswitchinterval(THREAD_SWITCH_S)

    end_at_sigterm()
    try:
        from outrider.rpc import runtime

        runtime.prepare_grpc()
        runtime.progress("scorer", "starting")
        with start_times.phase("imports"), runtime.importing():
            from scorer_service.app import ScorerApp
            from scorer_service.core import NAME
    except KeyboardInterrupt:  # torch takes seconds to import; afterwards the loop has the signal
        return 130
    app = ScorerApp(ScorerOptions(**args))
    return runtime.run(NAME, app, exit_with_parent=exit_with_parent)


def _follow(args: dict[str, Any]) -> NoReturn:
    """Become vLLM's process of a machine that the first one directs. Raises `ConfigError`."""
    folder = resolve_model(args["model"], "target")
    words = ScorerOptions(**args).for_vllm().follow_argv(str(folder))
    os.execv(sys.executable, [sys.executable, "-P", "-m", *words])


def _engine(args: dict[str, Any]) -> str:
    """Return the engine that serves, with flags that fit it. Raises `ConfigError`."""
    flags, asked = args["vllm_flags"], args["engine"]
    folder = find_local(args["model"], "target")
    if folder is None and asked == engines.AUTO:
        if not flags and not engines.has_vllm():
            return engines.NATIVE  # which downloads the model, and says if vLLM may serve it
        folder = resolve_model(args["model"], "target", tokenizer_only=True)
    on_gpu = args["device"].startswith("cuda")
    wanted = engines.Wanted({}, on_gpu)
    if folder is not None:
        wanted = engines.Wanted.of(folder, on_gpu=on_gpu, num_devices=num_devices(flags))
    engine = engines.choose(asked, wanted)
    if engine == engines.NATIVE and flags:
        raise ConfigError(f"{' '.join(flags)}: flags of vLLM need --engine vllm.")
    engines.check_rounding(engine, args["quantization"])
    synthetic = args["synthetic_acceptance_rates"] or args["synthetic_acceptance_length"]
    engines.check_synthetic(engine, asked=bool(synthetic))
    if engine == engines.VLLM and args["kv_cache_dtype"] != KV_CACHE_DTYPES[0]:
        args["vllm_flags"] = ("--kv-cache-dtype", args["kv_cache_dtype"], *flags)
    proposer = args["in_process_proposer"] is not None
    if engine == engines.VLLM and proposer and gives_speculation(args["vllm_flags"]):
        raise ConfigError(
            "--in-process-proposer and vLLM's own --speculative-config exclude each other: leave "
            "one of them out."
        )
    if engine == engines.VLLM and args["attention_backend"]:
        raise ConfigError(
            "--attention-backend is for --engine native. With vLLM, give its own after --, as "
            "-- --attention-backend FLASH_ATTN."
        )
    return engine


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing down the interpreter under an engine thread that is still loading a model would abort.
    os._exit(exit_code)
