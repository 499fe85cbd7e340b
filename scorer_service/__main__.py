"""Runs `python -m scorer_service`, which serves one model replica. See --help."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from outrider import engines, flag_types, start_times
from outrider.config import (
    DTYPES,
    KV_CACHE_DTYPES,
    NUM_SPECULATIVE_TOKENS,
    QUANTIZATIONS,
    SPECULATION_POLICIES,
    THREAD_SWITCH_S,
    acceptance_rates,
)
from outrider.drafting.building.config import check_files
from outrider.errors import ConfigError, refuse
from outrider.models.local_files import check_target
from outrider.models.resolve import find_local, resolve_model
from outrider.rpc.deployment import Help, add_deployment_flags, take_deployment
from outrider.signals import end_at_sigterm
from outrider.temporary import temporary_folder
from outrider.vllm.flags import (
    add_parallel_flags,
    node_rank,
    num_devices,
    take_parallel_flags,
)
from scorer_service import prefetch

_DEFAULTS: dict[str, dict[str, int | None]] = {
    "cpu": {"max_num_batched_tokens": 512, "kv_cache_memory": 512, "page_size": 16},
    "cuda": {"max_num_batched_tokens": 2048, "kv_cache_memory": None, "page_size": 64},
}
_VLLM_DEFAULTS: dict[str, int | None] = {"max_num_batched_tokens": 0, "page_size": 0}
_NATIVE_ONLY = ("in_process_proposer", "hidden_features", "attention_backend")


def parser() -> flag_types.RaisingParser:
    """Return a parser of the flags."""
    p = flag_types.RaisingParser(
        prog="outrider scorer",
        description="Verifies drafts for one model replica; owns its committed tokens. With "
        "--engine vllm, flags of vLLM itself may follow after --.",
        formatter_class=Help,
    )
    add = p.add_argument
    add("--host", type=flag_types.some_text, default="127.0.0.1", help="address to listen on")
    add("--port", type=flag_types.port, default=0, help="gRPC port; 0: a free one")
    add(
        "--data-port",
        type=flag_types.port,
        default=0,
        help="port of the plain connections that proposers are offered beside gRPC; 0: a free one",
    )
    add("--metrics-port", type=flag_types.port, default=0, help="HTTP port of /metrics; 0: free")
    add("--model", default="embedded", help='"embedded", a folder, or a Hugging Face id')
    add("--served-model-name", default="default", help="the name clients ask for")
    add("--scorer-id", default=None, help="name in traces; default: host name and pid")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="float32: text equal to the last bit with any draft, or none; else faster, and near "
        "ties may fall differently",
    )
    add(
        "--quantization",
        type=_quantization,
        default=None,
        metavar="{int8,fp8,none}",
        help="round the weights of linear layers when they are loaded: int8 or float8 (e4m3), a "
        "scale for each output; half the memory, and faster on CUDA in bfloat16; default: none",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default=KV_CACHE_DTYPES[0],
        help="of keys and values. fp8: float8 (e4m3) with a scale for each token and head, so that "
        "nearly twice the tokens fit; steps are slower, text changes a little; auto: the model's",
    )
    add("--device", default="cpu", help='"cpu" or "cuda"')
    add(
        "--engine",
        choices=engines.ENGINES,
        default=engines.AUTO,
        help="native: Outrider's own; vllm: everything that vLLM serves; auto: native for what it "
        "serves exactly and faster, else vllm",
    )
    add_parallel_flags(p)
    add(
        "--attention-backend",
        default=None,
        help="flash, triton, numba or sdpa; default: the best that fits",
    )
    add("--threads", type=flag_types.positive, default=2, help="threads that torch uses")
    add(
        "--num-speculative-tokens",
        type=flag_types.speculative_tokens,
        default=NUM_SPECULATIVE_TOKENS,
        help="K: draft tokens verified per request and round; 0 switches speculation off",
    )
    add(
        "--speculation-policy",
        choices=SPECULATION_POLICIES,
        default=SPECULATION_POLICIES[0],
        help="adaptive: as many draft tokens as are measured to be the fastest, down to none; "
        "fixed: K in every round, and rows wait for them up to a second: to compare drafts; "
        "off: proposers may attach, but nothing is drafted: to compare with no speculation",
    )
    add(
        "--synthetic-acceptance-rates",
        type=flag_types.rates,
        default=(),
        metavar="P[,...]",
        help="for benchmarks only: how likely a round accepts at least 1, 2, ... K draft tokens, "
        "whatever they are; texts are then not the model's",
    )
    add(
        "--synthetic-acceptance-length",
        type=float,
        metavar="L",
        help="the same by the mean tokens of a round, the model's own included: from 1 to K + 1",
    )
    add("--max-num-seqs", type=flag_types.positive, default=128, help="requests in a batch")
    add(
        "--max-num-batched-tokens",
        type=flag_types.positive,
        default=None,
        help="query tokens in a step; default: 512 on a CPU, 2048 on CUDA, or --max-num-seqs",
    )
    add(
        "--max-model-len",
        type=partial(flag_types.whole, low=3),
        default=None,
        help="context; default: the model's",
    )
    add(
        "--gpu-memory-utilization",
        type=flag_types.part,
        default=0.9,
        help="part of a CUDA device's memory to use; keys and values get what the rest leaves",
    )
    add(
        "--kv-cache-memory",
        type=partial(flag_types.whole, low=1, high=2**63 - 1),
        default=None,
        help="MiB for keys and values; default: 512 on a CPU, on CUDA what is left",
    )
    add(
        "--page-size",
        type=flag_types.positive,
        default=None,
        help="tokens per page of the KV cache; default: 16 on a CPU, 64 on CUDA",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse keys and values of prompts seen before",
    )
    add(
        "--hidden-features",
        default=None,
        metavar="STATES",
        help="hidden states to keep for proposers that read them, beside keys and values: numbers "
        "of layers (0: entering the first), final (after the last norm: EAGLE, MTP, Medusa), "
        "eagle3 (what its modules read), or several with commas; default: what the in-process "
        "proposer reads, else none",
    )
    add(
        "--listen-unix",
        type=_socket_path,
        metavar="PATH",
        help="serve gRPC on this Unix socket, too: for proposers on the same machine",
    )
    add(
        "--in-process-proposer",
        metavar="FLAGS",
        help="draft in this process, in turns with its steps: the flags of a proposer that say by "
        'which methods, quoted, as "--method eagle3 --model FOLDER"; the fastest where target and '
        "draft share a GPU",
    )
    add(
        "--start-timeout",
        type=float,
        metavar="SECONDS",
        default=600.0,
        help="how long loading and warming up may take",
    )
    add_deployment_flags(p)
    add("--exit-with-parent", action="store_true", help="stop when the parent process is gone")
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
    if flags is not None:
        os.environ["OMP_NUM_THREADS"] = str(args["threads"])  # the import below loads NumPy
        from scorer_service.drafting.in_process_flags import states_of, take

        args["in_process_proposer"] = methods = take(flags, args["model"], args["device"])
        args["hidden_features"] = args["hidden_features"] or states_of(methods)
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
            from scorer_service.config import ScorerOptions
            from scorer_service.core import NAME
    except KeyboardInterrupt:  # torch takes seconds to import; afterwards the loop has the signal
        return 130
    app = ScorerApp(ScorerOptions(**args))
    return runtime.run(NAME, app, exit_with_parent=exit_with_parent)


def _follow(args: dict[str, Any]) -> NoReturn:
    """Become vLLM's process of a machine that the first one directs. Raises `ConfigError`."""
    from scorer_service.config import ScorerOptions

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
    unfit = [name for name in _NATIVE_ONLY if args[name]]
    if engine == engines.VLLM and unfit:
        flag = f"--{unfit[0].replace('_', '-')}"
        raise ConfigError(
            f"{flag} is for --engine native. With vLLM, "
            + (
                f"give its own after --, as -- {flag} FLASH_ATTN."
                if flag == "--attention-backend"
                else "start a proposer beside it, or give its own --speculative-config after --."
            )
        )
    return engine


def _socket_path(text: str) -> str:
    if len(os.fsencode(text)) > flag_types.MAX_SOCKET_PATH:
        raise argparse.ArgumentTypeError(
            f"{text!r} is longer than {flag_types.MAX_SOCKET_PATH} bytes: the system allows 107, "
            "and the sockets for data connections, which lie beside it, add .data or .vllm.data"
        )
    return text


def _quantization(text: str) -> str | None:
    if text not in (*QUANTIZATIONS, "none"):
        raise argparse.ArgumentTypeError(f"{text!r} is not int8, fp8 or none")
    return None if text == "none" else text


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing down the interpreter under an engine thread that is still loading a model would abort.
    os._exit(exit_code)
