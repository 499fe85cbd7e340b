"""Measure the acceptance of methods that read hidden states, and the cost of their drafts.

    python -m benchmarks.hidden_states [--head eagle3 mtp=FOLDER] [--model TARGET]
        [--draft-model FOLDER] [--temperatures 0 1] [--chain 3 4 5] [--tree-nodes 4 8 16]
    python -m benchmarks.hidden_states --head --chain 4 --rules rejection typical top_p_window
        [--temperatures 0.6 0.8 1] [--timed-prompts 16]

The target runs in float32 on held-out prompts. Each head drafts chains and trees of several sizes,
beside a draft model and no speculation. Acceptance is measured along texts that are written once
(lib/replay.py): `length` is 1 + accepted tokens per round, and the positions are the shares of
rounds in which at least so many tokens were accepted. Times come from fewer prompts, on which
engine and proposer run in one process, a request at a time, each prompt under all contenders in
changing order. `draft ms` is the CPU time of a draft after the first, and `speed-up` is over no
speculation's tokens per CPU second after that first draft. `state B` is the size of a token's
states on their way to the module. The exit code is 1 if a text is not that of no speculation.

`--prompts benchmarks/prompts/categories.jsonl` adds the length by category of prompt, as
SPEED-Bench does, of a target that knows more than Python.

With `--rules` the draft model's chains are also verified under these. Their texts differ, so their
acceptance is that of the timed prompts, and does not count for the exit code.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.lib import prompts, report
from benchmarks.lib.loop import Loop, Outcome, engine_config
from benchmarks.lib.program import arguments, guarded, say
from benchmarks.lib.replay import Capture, Replay, lengths, record, replay
from outrider.drafting.building.config import HeadConfig
from outrider.drafting.building.heads import build_head
from outrider.drafting.cpu.llama_chains import LlamaChains
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.proposer import TREE_WIDTH, Proposer
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.features import FeatureSpec
from outrider.models.resolve import EMBEDDED, resolve_model
from outrider.params import (
    REQUEST_RULES,
    SamplingParams,
    SpeculationParams,
    StopParams,
    TokenIds,
    Verification,
    VerificationRule,
)
from outrider.types import Request

PAGE_SIZE, NUM_PAGES = 16, 1024
COUPLED = VerificationRule.COUPLED.value
RULES = [rule.value for rule in REQUEST_RULES if rule.value != COUPLED]


@dataclass(frozen=True)
class Contender:
    """A method that drafts one shape of one size."""

    name: str
    shape: str  # "chain", "tree", or "" for none
    k: int  # tokens of a chain, nodes of a tree
    proposer: Proposer | None
    rule: VerificationRule = VerificationRule.COUPLED

    @property
    def replayed(self) -> Proposer | None:
        """Return the proposer if its acceptance is that along texts that are written once."""
        return self.proposer if self.rule is VerificationRule.COUPLED else None


@dataclass(frozen=True)
class Row:
    """One contender at one temperature."""

    temperature: float
    name: str
    rule: str
    shape: str
    k: int
    length: float | None
    positions: tuple[float, ...]  # share of the rounds in which at least so many were accepted
    by_category: dict[str, float]  # the length
    drafted: float | None  # tokens per round
    draft_ms: float | None
    state_bytes: int
    speed_up: float  # over no speculation
    equal: float


class Bench:
    """A target whose hidden states are kept, and an engine for one contender at a time."""

    def __init__(self, target: Path, specs: Sequence[FeatureSpec], max_k: int) -> None:
        captured = None
        if specs:
            captured = FeatureSpec(
                specs[0].hidden_size,
                tuple(sorted({layer for spec in specs for layer in spec.layers})),
                any(spec.final_norm for spec in specs),
            )
        self._model = model = load_model(
            target,
            ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, features=captured),
            dtype=torch.float32,
        )
        self._loop = Loop(model, max_k)
        self._max_k = max_k
        self._sessions = 0

    def record(
        self, requests: Sequence[tuple[TokenIds, SamplingParams]], num_tokens: int
    ) -> list[Capture]:
        """Return the texts of requests with their states."""
        config = engine_config(self._model, self._max_k)
        return record(self._model, config, requests, num_tokens)

    def run(
        self, prompt: TokenIds, sampling: SamplingParams, max_tokens: int, one: Contender
    ) -> Outcome:
        """Run one request from prompt to end."""
        self._sessions += 1
        verification = Verification(one.rule)
        speculation = SpeculationParams(one.proposer is not None, verification=verification)
        stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(self._sessions, prompt, sampling, stop, speculation)
        return self._loop.run(request, one.proposer, one.k)


def heads(
    given: Mapping[str, str], target: str, chains: Sequence[int], tree_nodes: Sequence[int]
) -> list[Contender]:
    """Return chains and trees of the modules in `given`, by method. Raises `ConfigError`.

    Chains that are longer than a head can draft are left out.
    """
    found: list[Contender] = []
    shapes = [(name, sizes) for name, sizes in (("chain", chains), ("tree", tree_nodes)) if sizes]
    for method, name in given.items():
        for shape, sizes in shapes:
            config = HeadConfig(
                name=method,
                model=name,
                target_model=target,
                max_draft_tokens=max(sizes),
                tree_width=1 if shape == "chain" else TREE_WIDTH,
            )
            proposer, _ = build_head(config, max_sessions=256, prefill_budget=256, say=print)
            longest = proposer.traits.max_draft_tokens
            found += [Contender(method, shape, k, proposer) for k in sizes if k <= longest]
    return found


def draft_model(
    folder: Path, chains: Sequence[int], rules: Sequence[VerificationRule] = ()
) -> list[Contender]:
    """Return chains of a draft model on demand, without branches, under coupled and `rules`."""
    options = ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    model = load_model(folder, options, dtype=torch.float32)
    fast = LlamaChains.load(folder, model.pools, model.max_model_len)
    proposer = DraftModelProposer(model, name="draft", chain_drafter=fast)
    return [
        Contender("draft_model", "chain", k, proposer, rule)
        for rule in (VerificationRule.COUPLED, *rules)
        for k in chains
    ]


def row(
    temperature: float,
    one: Contender,
    found: Replay | None,
    samples: Sequence[Outcome],
    plain: Sequence[Outcome],
    by_category: dict[str, float],
) -> Row:
    """Sum up a contender; `plain` are the prompts of its `samples` without speculation."""
    spec = None if one.proposer is None else one.proposer.traits.features
    pairs = list(zip(samples, plain, strict=True))
    draft_s = [seconds for sample in samples for seconds in sample.draft_s[1:]]
    length = drafted = None
    if found is not None:
        length, drafted = found.length, found.drafted / found.rounds
    elif one.proposer is not None:
        stats = [sample.stats for sample in samples]
        rounds = sum(sum(s.k_histogram[1:]) for s in stats)  # with a draft
        length = 1 + sum(s.accepted for s in stats) / rounds
        drafted = sum(s.drafted for s in stats) / rounds
    return Row(
        temperature=temperature,
        name=one.name,
        rule=one.rule.value,
        shape=one.shape,
        k=one.k,
        length=length,
        positions=found.positions if found else (),
        by_category=by_category,
        drafted=drafted,
        draft_ms=statistics.mean(draft_s) * 1e3 if draft_s else None,
        state_bytes=0 if spec is None else spec.row_bytes,
        speed_up=statistics.median(
            b.decode_s / (a.decode_s - sum(a.draft_s[:1])) for a, b in pairs
        ),
        equal=sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs),
    )


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the report's tables, by lines."""
    head = [
        *("T and method", "draft of", "length", "accepted per position", "drafted"),
        *("draft ms", "state B", "speed-up", "equal"),
    ]
    body = [
        [
            f"{r.temperature:g} {r.name}" + ("" if r.rule == COUPLED else f", {r.rule}"),
            f"{r.shape} {r.k}" if r.shape else "",
            report.number(r.length),
            " ".join(f"{share:.0%}" for share in r.positions),
            report.number(r.drafted, 1),
            report.number(r.draft_ms),
            f"{r.state_bytes}" if r.state_bytes else "",
            f"{r.speed_up:.2f}",
            f"{r.equal:.0%}",
        ]
        for r in rows
    ]
    lines = report.table(head, body)
    names = [*dict.fromkeys(name for r in rows for name in r.by_category)]
    if names:
        told = [
            [f"{r.temperature:g} {r.name}", f"{r.shape} {r.k}"]
            + [report.number(r.by_category[name]) for name in names]
            for r in rows
            if r.by_category
        ]
        lines += ["", *report.table(["T and method", "draft of", *names], told)]
    return lines


def parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.hidden_states", __doc__)
    p.add_argument("--model", default="embedded")
    p.add_argument(
        "--head",
        nargs="*",
        default=["eagle3", "mtp", "medusa", "mlp_speculator"],
        metavar="METHOD[=FOLDER]",
        help="no folder: the embedded one (default: all of these)",
    )
    p.add_argument("--draft-model", default="embedded", help='"none": leave it out')
    p.add_argument("--rules", nargs="*", default=[], choices=RULES, help="of the draft model, too")
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--prompts", type=Path, help="JSON lines (default: the held-out ones)")
    p.add_argument("--num-prompts", type=int, default=48)
    p.add_argument("--timed-prompts", type=int, default=2, help="of them, those that are timed")
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--chain", type=int, nargs="+", default=[3, 4, 5], help="lengths of chains")
    p.add_argument("--tree-nodes", type=int, nargs="*", default=[3, 4, 5, 8, 16])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all texts are equal, 1 if one differs, 2 if a head cannot be used."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    target = resolve_model(args.model, "target")
    named = [each.partition("=") for each in args.head]
    given = {method: folder or EMBEDDED for method, _, folder in named}
    contenders = heads(given, args.model, args.chain, args.tree_nodes)
    specs = [c.proposer.traits.features for c in contenders if c.proposer is not None]
    if args.draft_model != "none":
        rules = [VerificationRule(rule) for rule in args.rules]
        contenders += draft_model(resolve_model(args.draft_model, "draft"), args.chain, rules)
    contenders.insert(0, Contender("none", "", 0, None))
    bench = Bench(target, [spec for spec in specs if spec], max(c.k for c in contenders) or 1)
    loaded = prompts.load(args.prompts, target, count=args.num_prompts, max_prompt_tokens=192)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    settings |= {"prompts": loaded.file, "prompts_sha256": loaded.sha256}
    rows: list[Row] = []
    for one in contenders:  # warm up
        bench.run(loaded.token_ids[0], SamplingParams(1.0), 8, one)
    for temperature in args.temperatures:
        requests = [
            (prompt, SamplingParams(temperature, seed=seed))
            for seed, prompt in enumerate(loaded.token_ids)
        ]
        texts = bench.record(requests, args.max_tokens)
        samples: list[list[Outcome]] = [[] for _ in contenders]
        for seed, (prompt, sampling) in enumerate(requests[: args.timed_prompts]):
            for turn in range(len(contenders)):
                i = (seed + turn) % len(contenders)
                samples[i].append(bench.run(prompt, sampling, args.max_tokens, contenders[i]))
            say(f"temperature {temperature:g}: prompt {seed + 1}")
        for one, mine in zip(contenders, samples, strict=True):
            found, by_category = None, {}
            if (drafter := one.replayed) is not None:
                found = replay(texts, drafter, one.k)
                by_category = lengths(texts, drafter, one.k, loaded.categories)
            rows.append(row(temperature, one, found, mine, samples[0], by_category))
    report.publish(
        "Acceptance of methods that read hidden states",
        "benchmarks.hidden_states",
        tables(rows),
        [asdict(each) for each in rows],
        args.out / "hidden_states",
        **settings,
    )
    return int(any(each.equal < 1.0 for each in rows if each.rule == COUPLED))


if __name__ == "__main__":
    sys.exit(main())
