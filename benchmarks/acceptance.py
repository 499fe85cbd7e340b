"""How many drafts each verification rule accepts, and what that brings, without a network.

    python -m benchmarks.acceptance [--temperatures 0.6 0.8 1.0] [--num-prompts 12] [--out FOLDER]

The engine and the draft model take turns in one process, a request at a time, K tokens a round,
float32, on demand (no branches ahead). Every prompt runs without speculation and under every rule,
one right after the other and in changing order, so that a ratio compares neighbours in time; the
speed-up is the median of the prompts' ratios. `length` is 1 + accepted tokens per round with a
draft, `bytes` the size of a round's block on the wire, `equal` the share of texts that are those of
no speculation at the same seed: under rejection they follow the same law and are others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import prompts, report
from outrider.config import EngineConfig
from outrider.drafting.cpu.llama_chains import LlamaChains
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.proposer import SessionStart
from outrider.engine.engine import Engine
from outrider.engine.model.loader import load_model
from outrider.engine.policy.fixed import FixedPolicy
from outrider.models.resolve import resolve_model
from outrider.params import (
    SamplingParams,
    SpeculationParams,
    StopParams,
    TokenIds,
    Verification,
    VerificationRule,
)
from outrider.rpc import codec
from outrider.types import Commit, Request, RequestStats
from outrider.v1 import draft_pb2

PAGE_SIZE, NUM_PAGES = 16, 64
NONE = "none"
RULES = (NONE, *(rule.value for rule in VerificationRule))


@dataclass(frozen=True)
class Sample:
    """One prompt under one rule."""

    token_ids: TokenIds
    stats: RequestStats
    decode_s: float  # after the first token
    block_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.decode_s


@dataclass(frozen=True)
class Row:
    """One rule at one temperature."""

    temperature: float
    rule: str
    acceptance: float | None  # of drafted tokens
    length: float | None
    tokens_per_round: float
    tokens_per_s: float  # median
    speed_up: float  # over no speculation
    bytes_per_round: float | None
    equal: float


class Pair:
    """A target and a draft model that take turns."""

    def __init__(self, target: Path, draft: Path, k: int) -> None:
        sizes = {"dtype": torch.float32, "page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
        model = load_model(target, **sizes)  # type: ignore[arg-type]
        config = EngineConfig(
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            max_model_len=min(model.max_model_len, PAGE_SIZE * NUM_PAGES),
            num_speculative_tokens=k,
            enable_prefix_caching=False,
        )
        # Its drafts are always there: it never waits.
        self._engine = Engine(model, config, policy=FixedPolicy(k, max_wait_s=60.0))
        drafter = load_model(draft, **sizes)  # type: ignore[arg-type]
        fast = LlamaChains.load(draft, drafter.pools, drafter.max_model_len)
        self._method = DraftModelProposer(drafter, name="draft", chain_drafter=fast)
        self._k = k
        self._sessions = 0

    def run(self, prompt: TokenIds, sampling: SamplingParams, max_tokens: int, rule: str) -> Sample:
        """One request from prompt to end."""
        self._sessions = session = self._sessions + 1
        speculation = SpeculationParams(enabled=False)
        if rule != NONE:
            speculation = SpeculationParams(verification=Verification(VerificationRule(rule)))
        stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
        self._engine.submit(Request(session, prompt, sampling, stop, speculation))
        if speculation.enabled:
            max_len = len(prompt) + max_tokens
            start = SessionStart(
                prompt, sampling, self._k, max_len, rule=speculation.verification.rule
            )
            self._method.open(session, start)
            self._engine.set_drafting(session, "draft", self._k)
        tokens: list[int] = []
        block_bytes, began = 0, 0.0
        while True:
            commit = self._step()
            tokens += commit.token_ids
            if commit.finish_reason is not None:
                break
            began = began or time.perf_counter()
            if speculation.enabled:
                wanted = commit.num_draft_tokens
                self._method.commit(session, commit.base_len, commit.token_ids, wanted)
                block_bytes += self._draft(session)
        ended = time.perf_counter()
        self._method.close(session)
        assert commit.stats is not None
        return Sample(tuple(tokens), commit.stats, ended - began, block_bytes)

    def _step(self) -> Commit:
        """Step until the request commits something."""
        while True:
            events = self._engine.step()
            if events is not None and events.commits:
                return events.commits[0]

    def _draft(self, session: int) -> int:
        """Post a draft; returns its bytes on the wire."""
        while not (drafts := self._method.draft([session]).drafts):
            pass  # the prompt takes several calls
        tree = drafts[0][1]
        self._engine.post_block(session, tree, "draft", 0)
        block = draft_pb2.Block(
            base_len=tree.base_len,
            token_ids=tree.token_ids,
            draft_probs=[codec.draft_probs_to_proto(probs) for probs in tree.probs],
        )
        return block.ByteSize()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default="embedded")
    p.add_argument("--draft-model", default="embedded")
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    p.add_argument("--rules", nargs="+", choices=RULES[1:], default=RULES[1:])
    p.add_argument("--num-prompts", type=int, default=12)
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--num-speculative-tokens", type=int, default=4)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return p


def main() -> int:
    args = parser().parse_args()
    torch.set_num_threads(args.threads)
    target = resolve_model(args.model, "target")
    pair = Pair(target, resolve_model(args.draft_model, "draft"), args.num_speculative_tokens)
    loaded = prompts.load(None, target, count=args.num_prompts, max_prompt_tokens=192)
    names = [NONE, *args.rules]
    machine = report.machine()
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    settings |= {"prompts": loaded.file, "prompts_sha256": loaded.sha256}
    rows: list[Row] = []
    for name in names:  # warm up
        pair.run(loaded.token_ids[0], SamplingParams(1.0), 8, name)
    for temperature in args.temperatures:
        samples: dict[str, list[Sample]] = {name: [] for name in names}
        for seed, prompt in enumerate(loaded.token_ids):
            sampling = SamplingParams(temperature, seed=seed)
            turn = seed % len(names)
            for name in (*names[turn:], *names[:turn]):
                samples[name].append(pair.run(prompt, sampling, args.max_tokens, name))
            print(f"temperature {temperature:g}: prompt {seed + 1}", file=sys.stderr, flush=True)
        rows += [row(temperature, name, samples[name], samples[NONE]) for name in names]
        found = {"machine": machine, "settings": settings, "rows": [asdict(each) for each in rows]}
        text = "\n".join(document(rows, machine, settings))
        report.write(found, text, args.out / "acceptance")  # so far
    print(text)
    return 0


def row(temperature: float, rule: str, samples: Sequence[Sample], plain: Sequence[Sample]) -> Row:
    """Sum up a rule's samples; `plain` are the same prompts without speculation."""
    stats = [sample.stats for sample in samples]
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    with_draft = sum(sum(s.k_histogram[1:]) for s in stats)
    pairs = list(zip(samples, plain, strict=True))
    return Row(
        temperature=temperature,
        rule=rule,
        acceptance=accepted / drafted if drafted else None,
        length=1 + accepted / with_draft if with_draft else None,
        tokens_per_round=sum(s.output_tokens for s in stats) / sum(s.rounds for s in stats),
        tokens_per_s=statistics.median(sample.tokens_per_s for sample in samples),
        speed_up=statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs),
        bytes_per_round=sum(s.block_bytes for s in samples) / with_draft if with_draft else None,
        equal=sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs),
    )


def document(
    rows: Sequence[Row], machine: dict[str, object], settings: dict[str, object]
) -> list[str]:
    """The report, by lines."""
    head = [
        "T and rule",
        "acceptance",
        "length",
        "tok/round",
        "tok/s",
        "speed-up",
        "bytes",
        "equal",
    ]
    body = [
        [
            f"{r.temperature:g} {r.rule}",
            "" if r.acceptance is None else f"{r.acceptance:.1%}",
            report.number(r.length),
            f"{r.tokens_per_round:.2f}",
            f"{r.tokens_per_s:.1f}",
            f"{r.speed_up:.2f}",
            report.number(r.bytes_per_round, 0),
            f"{r.equal:.0%}",
        ]
        for r in rows
    ]
    facts = "; ".join(f"{name} {value}" for name, value in (*machine.items(), *settings.items()))
    return [
        "# Acceptance by verification rule",
        "",
        "`python -m benchmarks.acceptance`",
        "",
        f"{facts}.",
        "",
        *report.table(head, body),
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
