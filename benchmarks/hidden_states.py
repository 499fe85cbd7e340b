"""Measure the acceptance of methods that read hidden states.

    python -m benchmarks.hidden_states [--head eagle3 mtp=FOLDER] [--model TARGET]
        [--draft-model FOLDER] [--temperatures 0 1] [--chain 3 4 5] [--tree-nodes 4 8 16]

The target runs in float32 on held-out prompts. Each head drafts chains and trees of several sizes,
beside a draft model. Acceptance is measured along texts that are written once (lib/replay.py):
`length` is 1 + accepted tokens per round, and the positions are the shares of rounds in which at
least so many tokens were accepted. `draft ms` is the CPU time of a draft for one request, after its
first, and `state B` the size of a token's states on their way to the module.

`--prompts benchmarks/prompts/categories.jsonl` adds the length by category of prompt, as
SPEED-Bench does, of a target that knows more than Python.
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
from benchmarks.lib.program import arguments, guarded, say
from benchmarks.lib.replay import Capture, lengths, record, replay
from outrider.drafting.building.config import HeadConfig
from outrider.drafting.building.heads import build_head
from outrider.drafting.cpu.llama_chains import LlamaChains
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.proposer import TREE_WIDTH, Proposer
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.engine.model.paged_model import PagedModel
from outrider.features import FeatureSpec
from outrider.models.resolve import EMBEDDED, resolve_model
from outrider.params import SamplingParams

PAGE_SIZE, NUM_PAGES = 16, 1024


@dataclass(frozen=True)
class Contender:
    """A method that drafts one shape of one size."""

    name: str
    shape: str  # "chain" or "tree"
    k: int  # tokens of a chain, nodes of a tree
    proposer: Proposer


@dataclass(frozen=True)
class Row:
    """One contender at one temperature."""

    temperature: float
    name: str
    shape: str
    k: int
    length: float
    positions: tuple[float, ...]  # share of the rounds in which at least so many were accepted
    by_category: dict[str, float]  # the length
    drafted: float  # tokens per round
    draft_ms: float | None
    state_bytes: int


def load_target(folder: Path, specs: Sequence[FeatureSpec]) -> PagedModel:
    """Return a target in float32 that keeps the states of all `specs`."""
    captured = None
    if specs:
        captured = FeatureSpec(
            specs[0].hidden_size,
            tuple(sorted({layer for spec in specs for layer in spec.layers})),
            any(spec.final_norm for spec in specs),
        )
    options = ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, features=captured)
    return load_model(folder, options, dtype=torch.float32)


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


def draft_model(folder: Path, chains: Sequence[int]) -> list[Contender]:
    """Return chains of a draft model on demand, without branches."""
    options = ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    model = load_model(folder, options, dtype=torch.float32)
    fast = LlamaChains.of(model)
    proposer = DraftModelProposer(model, name="draft", chain_drafter=fast)
    return [Contender("draft_model", "chain", k, proposer) for k in chains]


def row(
    temperature: float,
    one: Contender,
    texts: Sequence[Capture],
    categories: Sequence[str],
    num_timed: int,
) -> Row:
    """Measure a contender along texts, and its drafts' time along the first `num_timed` of them."""
    spec = one.proposer.traits.features
    found = replay(texts, one.proposer, one.k)
    times = [1e3 * replay([text], one.proposer, one.k).draft_s for text in texts[:num_timed]]
    return Row(
        temperature=temperature,
        name=one.name,
        shape=one.shape,
        k=one.k,
        length=found.length,
        positions=found.positions,
        by_category=lengths(texts, one.proposer, one.k, categories),
        drafted=found.drafted / found.rounds,
        draft_ms=statistics.median(times) if times else None,
        state_bytes=0 if spec is None else spec.row_bytes,
    )


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the report's tables, by lines."""
    head = ["T and method", "draft of", "length", "accepted per position", "drafted"]
    head += ["draft ms", "state B"]
    body = [
        [
            f"{r.temperature:g} {r.name}",
            f"{r.shape} {r.k}",
            report.number(r.length),
            " ".join(f"{share:.0%}" for share in r.positions),
            report.number(r.drafted, 1),
            "" if r.draft_ms is None else report.number(r.draft_ms),
            f"{r.state_bytes}" if r.state_bytes else "",
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
        default=["eagle3", "dspark", "mtp", "medusa", "mlp_speculator"],
        metavar="METHOD[=FOLDER]",
        help="no folder: the embedded one (default: each of the embedded heads)",
    )
    p.add_argument("--draft-model", default="embedded", help='"none": leave it out')
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--prompts", type=Path, help="JSON lines (default: the held-out ones)")
    p.add_argument("--num-prompts", type=int, default=48)
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--chain", type=int, nargs="+", default=[3, 4, 5], help="lengths of chains")
    p.add_argument("--tree-nodes", type=int, nargs="*", default=[3, 4, 5, 8, 16])
    p.add_argument("--timed-prompts", type=int, default=4)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 2 if a head cannot be used."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    target = resolve_model(args.model, "target")
    named = [each.partition("=") for each in args.head]
    given = {method: folder or EMBEDDED for method, _, folder in named}
    contenders = heads(given, args.model, args.chain, args.tree_nodes)
    specs = [spec for c in contenders if (spec := c.proposer.traits.features) is not None]
    if args.draft_model != "none":
        contenders += draft_model(resolve_model(args.draft_model, "draft"), args.chain)
    model = load_target(target, specs)
    loaded = prompts.load(args.prompts, target, count=args.num_prompts, max_prompt_tokens=192)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    settings |= {"prompts": loaded.file, "prompts_sha256": loaded.sha256}
    rows: list[Row] = []
    for temperature in args.temperatures:
        requests = [
            (prompt, SamplingParams(temperature, seed=seed))
            for seed, prompt in enumerate(loaded.token_ids)
        ]
        texts = record(model, requests, args.max_tokens)
        for one in contenders:
            rows.append(row(temperature, one, texts, loaded.categories, args.timed_prompts))
            say(f"temperature {temperature:g}: {one.name}, {one.shape} {one.k}")
    report.publish(
        "Acceptance of methods that read hidden states",
        "benchmarks.hidden_states",
        tables(rows),
        [asdict(each) for each in rows],
        args.out / "hidden_states",
        **settings,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
