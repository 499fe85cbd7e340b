"""Measure methods that copy on editing and agentic work, beside no speculation.

    python -m benchmarks.reference_drafting [--edits 60] [--tasks 8] [--real 3] [--out NAME]

Outputs are given (lib/edit_traces.py) and forced on the target (lib/forced_target.py), so tokens
per round depend on the proposer alone; rounds include the first. tokens/s are those of the engine's
loop around the embedded target in float32, policy and drafting included, from the first token to
the last, per CPU second on one thread. All methods run each trace in turn. Writes
benchmarks/results/NAME.json and .md.

With `arctic-inference` in the environment (the reference implementation of SuffixDecoding; its
sdist needs a C++ compiler), its `SuffixDecodingCache` replays the same traces.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.lib import report
from benchmarks.lib.edit_traces import Trace, agentic, edits
from benchmarks.lib.forced_target import GREEDY, PAGE_SIZE, ForcedTarget, replay, request_of
from benchmarks.lib.loop import Outcome
from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.drafting.proposer import Proposer, SessionStart
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.models.resolve import resolve_model
from outrider.params import NO_ADVICE, Advice, TokenIds
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.fixed import FixedPolicy
from outrider.types import common_prefix_len

EDITS, AGENTIC = "edits", "agentic"
_RESULTS = Path(__file__).parent / "results"
_REAL_PROMPT = 512  # tokens: the embedded target has room for 2048
_REAL_OUTPUT = 320  # tokens at most


@dataclass(frozen=True)
class Tokens:
    """A trace in token ids."""

    workload: str
    kind: str
    prompt: TokenIds
    output: TokenIds
    advice: Advice


@dataclass(frozen=True)
class Row:
    """One method on one kind of trace."""

    workload: str
    kind: str
    method: str
    output_tokens: int
    rounds: int
    drafted: int
    accepted: int
    tokens_per_round: float
    tokens_per_s: float | None = None  # per CPU second; None: no model ran


METHODS: dict[str, tuple[Callable[[], Proposer], int]] = {
    "deterministic": (DeterministicProposer, 128),
    "suffix": (SuffixProposer, 24),
    "ngram": (NgramProposer, 16),
}


def tokenised(tokenizer: Tokenizer, workload: str, traces: Sequence[Trace]) -> list[Tokens]:
    def ids(text: str) -> TokenIds:
        return tuple(tokenizer.encode(text).ids)

    return [
        Tokens(
            workload,
            trace.kind,
            ids(trace.prompt),
            ids(trace.output),
            Advice(ids(trace.advice), edit=True) if trace.advice else NO_ADVICE,
        )
        for trace in traces
    ]


def rows_of(done: Sequence[tuple[Tokens, Outcome]], method: str, *, timed: bool) -> list[Row]:
    """Return a row for each kind, and one for all of them."""
    kinds = list(dict.fromkeys(trace.kind for trace, _ in done))
    rows = []
    for kind in (*kinds, *(("all",) if len(kinds) > 1 else ())):
        runs = [run for trace, run in done if kind in (trace.kind, "all")]
        output = sum(len(run.token_ids) for run in runs)
        rounds = sum(run.stats.rounds for run in runs)
        seconds = sum(run.decode_s for run in runs)
        rows.append(
            Row(
                done[0][0].workload,
                kind,
                method,
                output,
                rounds,
                sum(run.stats.drafted for run in runs),
                sum(run.stats.accepted for run in runs),
                output / rounds,
                # The first token of each comes with the prompt, before the clock starts.
                (output - len(runs)) / seconds if timed else None,
            )
        )
    return rows


def merit(traces: Sequence[Tokens], vocab_size: int) -> list[Row]:
    """Return each method's tokens per round, with drafts of any length."""
    longest = max(len(trace.prompt) + len(trace.output) for trace in traces) + 1
    rows: list[Row] = []
    for method, (build, k) in METHODS.items():
        if method == "deterministic" and not traces[0].advice.token_ids:
            continue
        target, proposer = ForcedTarget(vocab_size, longest), build()
        done = []
        for i, trace in enumerate(traces):
            request = request_of(i, trace.prompt, trace.output, trace.advice, k)
            run = replay(target, FixedPolicy(k), request, trace.output, proposer, k)
            done.append((trace, run))
        rows += rows_of(done, method, timed=False)
    return rows


def remember(proposer: Proposer, traces: Sequence[Tokens]) -> None:
    """Let a proposer follow requests and their answers."""
    for i, trace in enumerate(traces):
        end = trace.prompt[-16:]
        proposer.open(-1 - i, SessionStart(end, GREEDY, 1, len(end) + len(trace.output) + 1))
        proposer.commit(-1 - i, len(end), trace.output, 1)
        proposer.close(-1 - i)


def at_cost(traces: Sequence[Tokens], before: Sequence[Tokens], target: ForcedTarget) -> list[Row]:
    """Return tokens/s of each method and of no speculation, under the adaptive policy.

    Methods that remember have followed the traces `before`.
    """
    advised = bool(traces[0].advice.token_ids)
    modes = {name: mode for name, mode in METHODS.items() if advised or name != "deterministic"}
    proposers = {name: build() for name, (build, _) in modes.items()}
    for proposer in proposers.values():
        remember(proposer, before)
    policies = {name: AdaptivePolicy(4) for name in ("none", *modes)}
    done: dict[str, list[tuple[Tokens, Outcome]]] = {name: [] for name in policies}
    for i, trace in enumerate(traces):
        prompt = trace.prompt[-_REAL_PROMPT:]
        names = list(policies)
        for name in (*names[i % len(names) :], *names[: i % len(names)]):
            drafter, k = proposers.get(name), modes[name][1] if name in modes else 0
            request = request_of(i, prompt, trace.output, trace.advice, k)
            run = replay(target, policies[name], request, trace.output, drafter, k)
            done[name].append((trace, run))
    return [row for name, runs in done.items() for row in rows_of(runs, name, timed=True)]


def arctic(traces: Sequence[Tokens]) -> Row | None:
    """Run the reference implementation on the same traces, as its simulator does."""
    try:
        package: Any = importlib.import_module("arctic_inference.suffix_decoding")
    except ImportError:
        return None
    cache = package.SuffixDecodingCache(max_tree_depth=24, max_cached_requests=10_000)
    output = rounds = drafted = accepted = 0
    for i, trace in enumerate(traces):
        cache.start_request(i, np.array(trace.prompt, np.int32))
        done = 0
        while done < len(trace.output):
            context = np.array((*trace.prompt, *trace.output[:done])[-24:], np.int32)
            guess = cache.speculate(i, context, max_spec_tokens=24).token_ids
            right = common_prefix_len(guess, trace.output[done:])
            fresh = trace.output[done : done + right + 1]
            cache.add_active_response(i, np.array(fresh, np.int32))
            done += len(fresh)
            rounds += 1
            drafted += len(guess)
            accepted += right
        cache.stop_request(i)
        output += done
    workload = traces[0].workload
    return Row(workload, "all", "arctic", output, rounds, drafted, accepted, output / rounds)


def _write(name: str, rows: Sequence[Row]) -> str:
    """Write the results so far, and return them as Markdown."""
    head = ["workload", "kind", "method", "tokens", "rounds", "drafted", "accepted"]
    body = [
        [
            *(row.workload, row.kind, row.method),
            *map(str, (row.output_tokens, row.rounds, row.drafted, row.accepted)),
            report.number(row.tokens_per_round),
            report.number(row.tokens_per_s, 0),
        ]
        for row in rows
    ]
    command = report.command("benchmarks.reference_drafting")
    machine = report.machine()
    lines = report.head("Drafting by copying", command, machine)
    lines += report.table([*head, "tokens/round", "tokens/s (CPU)"], body)
    text = "\n".join([*lines, ""])
    report.write({"setup": machine, "rows": [asdict(row) for row in rows]}, text, _RESULTS / name)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both workloads, at first without a model and then with one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--edits", type=int, default=60, help="edits to replay")
    parser.add_argument("--tasks", type=int, default=8, help="agentic tasks, three attempts each")
    parser.add_argument("--real", type=int, default=3, help="traces of each sort at a model's cost")
    parser.add_argument("--out", default="reference_drafting", help="name of the results")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    folder = resolve_model("embedded", "target")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    work = {
        EDITS: tokenised(tokenizer, EDITS, edits(limit=args.edits)),
        AGENTIC: tokenised(tokenizer, AGENTIC, agentic(tasks=args.tasks)),
    }
    rows: list[Row] = []
    for workload, traces in work.items():
        print(f"{workload}: {len(traces)} traces", file=sys.stderr)
        rows += merit(traces, tokenizer.get_vocab_size())
        rows += [row for row in (arctic(traces),) if row is not None]
    _write(args.out, rows)
    max_len = 2048
    model = load_model(
        folder,
        ModelOptions(page_size=PAGE_SIZE, num_pages=max_len // PAGE_SIZE, self_test=False),
        dtype=torch.float32,
    )
    target = ForcedTarget(model.vocab_size, max_len, model)
    for workload, traces in work.items():
        print(f"{workload}: {args.real} traces at the embedded target's cost", file=sys.stderr)
        short = [i for i, trace in enumerate(traces) if len(trace.output) <= _REAL_OUTPUT]
        chosen = short[-args.real :]
        rows += at_cost([traces[i] for i in chosen], traces[: chosen[0]], target)
        _write(args.out, rows)
    print(_write(args.out, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
