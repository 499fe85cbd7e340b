"""Drafting by copying, on editing and agentic work: tokens per round, tokens/s, cost per draft.

    python -m benchmarks.reference_drafting [--edits 60] [--tasks 8] [--real 3] [--out NAME]

Outputs are given (edit_traces.py) and forced on the target (forced_target.py), so tokens per round
are the proposer's merit; rounds include the first. tokens/s are those of the engine's whole loop
around the embedded target in float32, policy and drafting included, from the first token to the
last, per CPU second and on one thread: nothing is overlapped, and a busy machine disturbs little.
The three modes take turns at each trace. Writes benchmarks/results/NAME.json and .md.

With `arctic-inference` in the environment (the reference implementation of SuffixDecoding; its
sdist needs a C++ compiler), its `SuffixDecodingCache` replays the same traces as its own simulator
does.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.edit_traces import Trace, agentic, edits
from benchmarks.forced_target import GREEDY, PAGE_SIZE, ForcedTarget, Replay, replay
from benchmarks.reference_report import AGENTIC, EDITS, Row, report
from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.drafting.proposer import Proposer, SessionStart
from outrider.engine.model.loader import load_model
from outrider.engine.policy.adaptive import AdaptivePolicy
from outrider.engine.policy.fixed import FixedPolicy
from outrider.models.resolve import resolve_model
from outrider.params import NO_ADVICE, Advice, TokenIds
from outrider.types import common_prefix_len

_RESULTS = Path(__file__).parent / "results"
_REAL_PROMPT = 512  # tokens: the embedded target has room for 2048
_REAL_OUTPUT = 320  # tokens at most
_CONTEXT = 8192  # of a session whose drafts are timed


@dataclass(frozen=True)
class Tokens:
    """A trace in token ids."""

    workload: str
    kind: str
    prompt: TokenIds
    output: TokenIds
    advice: Advice

    @property
    def changed(self) -> float:
        """The share of the advice and the output that differs."""
        pair = difflib.SequenceMatcher(None, self.advice.token_ids, self.output, autojunk=False)
        return 1.0 - pair.ratio()


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


def rows_of(done: Sequence[tuple[Tokens, Replay]], method: str, *, timed: bool) -> list[Row]:
    """A row per kind, and one for all of them."""
    kinds = list(dict.fromkeys(trace.kind for trace, _ in done))
    rows = []
    for kind in (*kinds, *(("all",) if len(kinds) > 1 else ())):
        runs = [run for trace, run in done if kind in (trace.kind, "all")]
        output = sum(run.output_tokens for run in runs)
        rounds = sum(run.stats.rounds for run in runs)
        seconds = sum(run.seconds for run in runs)
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
    """Tokens per round of each method, drafts as long as it makes them."""
    longest = max(len(trace.prompt) + len(trace.output) for trace in traces) + 1
    rows: list[Row] = []
    for method, (build, k) in METHODS.items():
        if method == "deterministic" and not traces[0].advice.token_ids:
            continue
        target, proposer = ForcedTarget(vocab_size, longest), build()
        done = [
            (
                trace,
                replay(
                    target, FixedPolicy(k), i, trace.prompt, trace.output, proposer, trace.advice, k
                ),
            )
            for i, trace in enumerate(traces)
        ]
        rows += rows_of(done, method, timed=False)
    return rows


def remember(proposer: Proposer, traces: Sequence[Tokens]) -> None:
    """Lets a proposer see requests and their answers pass by."""
    for i, trace in enumerate(traces):
        end = trace.prompt[-16:]
        proposer.open(-1 - i, SessionStart(end, GREEDY, 1, len(end) + len(trace.output) + 1))
        proposer.commit(-1 - i, len(end), trace.output, 1)
        proposer.close(-1 - i)


def at_cost(traces: Sequence[Tokens], before: Sequence[Tokens], target: ForcedTarget) -> list[Row]:
    """tokens/s of each method and of none, in turns, under the adaptive policy.

    What came `before` is remembered by methods that remember.
    """
    advised = bool(traces[0].advice.token_ids)
    modes = {name: mode for name, mode in METHODS.items() if advised or name != "deterministic"}
    proposers = {name: build() for name, (build, _) in modes.items()}
    for proposer in proposers.values():
        remember(proposer, before)
    policies = {name: AdaptivePolicy(4) for name in ("none", *modes)}
    done: dict[str, list[tuple[Tokens, Replay]]] = {name: [] for name in policies}
    for i, trace in enumerate(traces):
        prompt = trace.prompt[-_REAL_PROMPT:]
        names = list(policies)
        for name in (*names[i % len(names) :], *names[: i % len(names)]):
            drafter, k = proposers.get(name), modes[name][1] if name in modes else 0
            run = replay(target, policies[name], i, prompt, trace.output, drafter, trace.advice, k)
            done[name].append((trace, run))
    return [row for name, runs in done.items() for row in rows_of(runs, name, timed=True)]


def costs(text_of: Sequence[Tokens], remembered: Sequence[Tokens]) -> dict[str, dict[str, float]]:
    """CPU microseconds of one draft and of one commit at a context of 8k tokens and more.

    The text is the outputs of `text_of`, one after the other; the suffix method has also answered
    `remembered`. Rounds are those of the text: what is accepted, and one token more.
    """
    text = [token for trace in text_of for token in trace.output][: 2 * _CONTEXT]
    found = {}
    for method in ("ngram", "suffix"):
        build, k = METHODS[method]
        proposer = build()
        remember(proposer, remembered)
        known = min(_CONTEXT, len(text) // 2)
        proposer.open(1, SessionStart(text[:known], GREEDY, k, 4 * _CONTEXT))
        drafts, commits = [], []
        while known < len(text):
            began = time.thread_time()
            round_ = proposer.draft([1])
            drafts.append(time.thread_time() - began)
            guess = round_.drafts[0][1].token_ids if round_.drafts else ()
            accepted = common_prefix_len(guess, text[known : known + k])
            fresh = text[known : known + accepted + 1]
            began = time.thread_time()
            proposer.commit(1, known, fresh, k)
            commits.append(time.thread_time() - began)
            known += len(fresh)
        found[method] = {
            "draft_us": 1e6 * statistics.median(drafts),
            "draft_p95_us": 1e6 * statistics.quantiles(drafts, n=20)[-1],
            "commit_us": 1e6 * statistics.median(commits),
            "rounds": len(drafts),
        }
    return found


def arctic(traces: Sequence[Tokens]) -> Row | None:
    """The reference implementation on the same traces, as its simulator runs it."""
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


def _write(
    name: str, rows: Sequence[Row], cost: dict[str, dict[str, float]], changed: float
) -> str:
    """What there is so far; returns it as Markdown."""
    result = {"rows": [asdict(row) for row in rows], "cost": cost, "edits_changed": changed}
    _RESULTS.joinpath(f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = report(rows, cost, changed)
    _RESULTS.joinpath(f"{name}.md").write_text(text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
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
    cost = costs(work[EDITS], work[AGENTIC])
    changed = statistics.mean(trace.changed for trace in work[EDITS])
    _write(args.out, rows, cost, changed)
    max_len = 2048
    model = load_model(
        folder,
        dtype=torch.float32,
        page_size=PAGE_SIZE,
        num_pages=max_len // PAGE_SIZE,
        self_test=False,
    )
    target = ForcedTarget(model.vocab_size, max_len, model)
    for workload, traces in work.items():
        print(f"{workload}: {args.real} traces at the embedded target's cost", file=sys.stderr)
        short = [i for i, trace in enumerate(traces) if len(trace.output) <= _REAL_OUTPUT]
        chosen = short[-args.real :]
        rows += at_cost([traces[i] for i in chosen], traces[: chosen[0]], target)
        _write(args.out, rows, cost, changed)
    print(_write(args.out, rows, cost, changed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
