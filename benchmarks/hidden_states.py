"""How much of their drafts methods that read hidden states see accepted, and what drafting costs.

    python -m benchmarks.hidden_states [--head eagle3 mtp=FOLDER] [--model TARGET]
        [--draft-model FOLDER] [--temperatures 0 1] [--chain 3 4 5] [--tree-nodes 4 8 16]

The target in float32, proposers as they are started, held-out prompts. Each head drafts chains and
trees of several sizes; beside it stand a draft model and no speculation. What is accepted is found
out along texts that are written once (benchmarks/replay.py): `length` is 1 + accepted tokens per
round, the positions say in how many rounds at least so many tokens were accepted.
Times come from fewer prompts, on which engine and proposer take turns in one process, a request at
a time, each prompt under all contenders, one right after the other and in changing order: `draft
ms` is the CPU time of a draft (not of a prompt's first, which processes the prompt), `speed-up` no
speculation's CPU time per token after that draft to this one's. `state B` is what the module is
sent of the target's states per token. Texts must be those of no speculation: exits with 1 if one
is not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch

from benchmarks import prompts, report
from benchmarks.replay import Capture, Replay, record, replay
from outrider.config import EngineConfig
from outrider.drafting.building.config import HeadConfig
from outrider.drafting.building.heads import build_head
from outrider.drafting.cpu.llama_chains import LlamaChains
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.proposer import TREE_WIDTH, FeatureProposer, Proposer, SessionStart
from outrider.engine.engine import Engine
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.engine.model.loader import load_model
from outrider.engine.policy.fixed import FixedPolicy
from outrider.errors import ConfigError
from outrider.features import FeatureBatch, FeatureOrder, FeatureSpec, FeatureWindow
from outrider.models.resolve import EMBEDDED, resolve_model
from outrider.params import SamplingParams, SpeculationParams, StopParams, TokenIds
from outrider.types import Request

PAGE_SIZE, NUM_PAGES = 16, 1024


@dataclass(frozen=True)
class Contender:
    """A way to draft."""

    name: str
    shape: str  # "chain", "tree", or "" for none
    k: int  # tokens of a chain, nodes of a tree
    proposer: Proposer | None


@dataclass(frozen=True)
class Sample:
    """One prompt under one contender."""

    token_ids: TokenIds
    decode_s: float  # CPU time after the first draft
    draft_s: tuple[float, ...]  # of each later draft

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.decode_s


@dataclass(frozen=True)
class Row:
    """One contender at one temperature."""

    temperature: float
    name: str
    shape: str
    k: int
    length: float | None
    positions: tuple[float, ...]
    """Of the rounds, the share in which so many tokens and more were accepted."""
    drafted: float | None  # tokens per round
    draft_ms: float | None
    state_bytes: int
    speed_up: float  # over no speculation
    equal: float


class Bench:
    """A target whose hidden states are captured, and contenders that take turns."""

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
            dtype=torch.float32,
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            features=captured,
        )
        self._config = config = EngineConfig(
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            max_model_len=min(model.max_model_len, PAGE_SIZE * NUM_PAGES),
            num_speculative_tokens=max_k,
            enable_prefix_caching=False,
        )
        pool = model.pools.features
        self._streams = None if pool is None else HiddenStateStreams(pool)
        # Its drafts are always there: it never waits.
        policy = FixedPolicy(max_k, max_wait_s=60.0)
        self._engine = Engine(model, config, policy=policy, features=self._streams)
        self._sessions = 0

    def record(
        self, requests: Sequence[tuple[TokenIds, SamplingParams]], num_tokens: int
    ) -> list[Capture]:
        """Their texts and states."""
        return record(self._model, self._config, requests, num_tokens)

    def run(
        self, prompt: TokenIds, sampling: SamplingParams, max_tokens: int, one: Contender
    ) -> Sample:
        """One request from prompt to end."""
        self._sessions = session = self._sessions + 1
        engine, method = self._engine, one.proposer
        speculation = SpeculationParams(enabled=method is not None)
        stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
        engine.submit(Request(session, prompt, sampling, stop, speculation))
        if method is not None:
            method.open(session, SessionStart(prompt, sampling, one.k, len(prompt) + max_tokens))
            spec = method.traits.features
            order = None if spec is None else FeatureOrder(0, spec, FeatureWindow())
            engine.set_drafting(session, "draft", one.k, features=order)
        tokens: list[int] = []
        began, draft_s = 0.0, list[float]()
        while True:
            events = engine.step()
            if events is None:
                continue
            self._feed(method, events.features)
            if not events.commits:
                continue
            (commit,) = events.commits
            tokens += commit.token_ids
            if commit.finish_reason is not None:
                break
            if method is not None:
                k = commit.num_draft_tokens
                method.commit(session, commit.base_len, commit.token_ids, k)
                draft_s.append(self._draft(method, session))
            began = began or time.process_time()
        ended = time.process_time()
        if method is not None:
            method.close(session)
        return Sample(tuple(tokens), ended - began, tuple(draft_s[1:]))

    def _draft(self, method: Proposer, session: int) -> float:
        """Post a draft; returns the CPU seconds it took."""
        seconds = 0.0
        while True:
            began = time.process_time()
            round_ = method.draft([session])
            seconds += time.process_time() - began
            assert not round_.lost
            if round_.drafts:
                self._engine.post_block(session, round_.drafts[0][1], "draft", 0)
                return seconds
            if self._engine.collect():  # a long prompt's states come in parts
                events = self._engine.take_events()
                self._feed(method, None if events is None else events.features)

    def _feed(self, method: Proposer | None, batch: FeatureBatch | None) -> None:
        if batch is None:
            return
        assert self._streams is not None
        for each in batch.rows:
            cast(FeatureProposer, method).features(each.session_id, each.start, each.rows)
            self._streams.give_back(each.window, len(each.rows))


def heads(
    given: Mapping[str, str], target: str, chains: Sequence[int], tree_nodes: Sequence[int]
) -> list[Contender]:
    """Those that `--head` names, by method: chains and trees. Raises `ConfigError`.

    Chains that are longer than a head foresees are left out.
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
    """A draft model, on demand: no branches ahead."""
    model = load_model(folder, dtype=torch.float32, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    fast = LlamaChains.load(folder, model.pools, model.max_model_len)
    proposer = DraftModelProposer(model, name="draft", chain_drafter=fast)
    return [Contender("draft_model", "chain", k, proposer) for k in chains]


def row(
    temperature: float,
    one: Contender,
    found: Replay | None,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
) -> Row:
    """Sum up a contender; `plain` are the prompts of its `samples` without speculation."""
    spec = None if one.proposer is None else one.proposer.traits.features
    pairs = list(zip(samples, plain, strict=True))
    draft_s = [seconds for sample in samples for seconds in sample.draft_s]
    return Row(
        temperature=temperature,
        name=one.name,
        shape=one.shape,
        k=one.k,
        length=found.length if found else None,
        positions=found.positions if found else (),
        drafted=found.drafted / found.rounds if found else None,
        draft_ms=statistics.mean(draft_s) * 1e3 if draft_s else None,
        state_bytes=0 if spec is None else spec.row_bytes,
        speed_up=statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs),
        equal=sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs),
    )


def document(
    rows: Sequence[Row], machine: Mapping[str, object], settings: Mapping[str, object]
) -> list[str]:
    """The report, by lines."""
    head = [
        *("T and method", "draft of", "length", "accepted per position", "drafted"),
        *("draft ms", "state B", "speed-up", "equal"),
    ]
    body = [
        [
            f"{r.temperature:g} {r.name}",
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
    facts = "; ".join(f"{name} {value}" for name, value in (*machine.items(), *settings.items()))
    return [
        "# Acceptance of methods that read hidden states",
        "",
        "`python -m benchmarks.hidden_states`",
        "",
        f"{facts}.",
        "",
        *report.table(head, body),
        "",
    ]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default="embedded")
    p.add_argument(
        "--head",
        nargs="*",
        default=["eagle3", "mtp", "medusa", "mlp_speculator"],
        metavar="METHOD[=FOLDER]",
        help="no folder: the embedded one (default: all of these)",
    )
    p.add_argument("--draft-model", default="embedded", help='"none": leave it out')
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--num-prompts", type=int, default=48)
    p.add_argument("--timed-prompts", type=int, default=2, help="of them, those that are timed")
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--chain", type=int, nargs="+", default=[3, 4, 5], help="lengths of chains")
    p.add_argument("--tree-nodes", type=int, nargs="*", default=[3, 4, 5, 8, 16])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    target = resolve_model(args.model, "target")
    named = [each.partition("=") for each in args.head]
    given = {method: folder or EMBEDDED for method, _, folder in named}
    try:
        contenders = heads(given, args.model, args.chain, args.tree_nodes)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    specs = [c.proposer.traits.features for c in contenders if c.proposer is not None]
    if args.draft_model != "none":
        contenders += draft_model(resolve_model(args.draft_model, "draft"), args.chain)
    contenders.insert(0, Contender("none", "", 0, None))
    bench = Bench(target, [spec for spec in specs if spec], max(c.k for c in contenders) or 1)
    loaded = prompts.load(None, target, count=args.num_prompts, max_prompt_tokens=192)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    settings |= {"prompts": loaded.file, "prompts_sha256": loaded.sha256}
    machine, rows = report.machine(), list[Row]()
    for one in contenders:  # warm up
        bench.run(loaded.token_ids[0], SamplingParams(1.0), 8, one)
    for temperature in args.temperatures:
        requests = [
            (prompt, SamplingParams(temperature, seed=seed))
            for seed, prompt in enumerate(loaded.token_ids)
        ]
        texts = bench.record(requests, args.max_tokens)
        came_true = [
            None if one.proposer is None else replay(texts, one.proposer, one.k)
            for one in contenders
        ]
        samples: list[list[Sample]] = [[] for _ in contenders]
        for seed, (prompt, sampling) in enumerate(requests[: args.timed_prompts]):
            for turn in range(len(contenders)):
                i = (seed + turn) % len(contenders)
                samples[i].append(bench.run(prompt, sampling, args.max_tokens, contenders[i]))
            print(f"temperature {temperature:g}: prompt {seed + 1}", file=sys.stderr, flush=True)
        rows += [
            row(temperature, one, found, mine, samples[0])
            for one, found, mine in zip(contenders, came_true, samples, strict=True)
        ]
        data = {"machine": machine, "settings": settings, "rows": [asdict(each) for each in rows]}
        text = "\n".join(document(rows, machine, settings))
        report.write(data, text, args.out / "hidden_states")  # so far
    print(text)
    return 0 if all(each.equal == 1.0 for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
