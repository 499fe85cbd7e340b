"""Measure how many draft tokens each verification rule accepts, beside no speculation.

    python -m benchmarks.acceptance [--temperatures 0.6 0.8 1.0] [--num-prompts 12] [--out FOLDER]

The engine and the draft model run in one process, a request at a time, K tokens a round, float32,
on demand. Every prompt runs without speculation and under every rule, one right after the other in
changing order. The speed-up is the median of the prompts' ratios of tokens per CPU second. `length`
is 1 + accepted tokens per round with a draft, `equal` the share of texts that are those of no
speculation at the same seed. Under rejection texts follow the same law and differ.
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
from benchmarks.lib.loop import Loop, Outcome
from benchmarks.lib.program import arguments
from outrider.drafting.cpu.llama_chains import LlamaChains
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.models.resolve import resolve_model
from outrider.params import (
    SamplingParams,
    SpeculationParams,
    StopParams,
    TokenIds,
    Verification,
    VerificationRule,
)
from outrider.types import Request

PAGE_SIZE, NUM_PAGES = 16, 64
NONE = "none"
RULES = (NONE, *(rule.value for rule in VerificationRule))


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
    equal: float


class Pair:
    """A target and a draft model in one process."""

    def __init__(self, target: Path, draft: Path, k: int) -> None:
        options = ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES)
        model = load_model(target, options, dtype=torch.float32)
        self._loop = Loop.of(model, k)
        drafter = load_model(draft, options, dtype=torch.float32)
        fast = LlamaChains.load(draft, drafter.pools, drafter.max_model_len)
        self._method = DraftModelProposer(drafter, name="draft", chain_drafter=fast)
        self._k = k
        self._sessions = 0

    def run(
        self, prompt: TokenIds, sampling: SamplingParams, max_tokens: int, rule: str
    ) -> Outcome:
        """Run one request from prompt to end."""
        self._sessions += 1
        speculation = SpeculationParams(enabled=False)
        if rule != NONE:
            speculation = SpeculationParams(verification=Verification(VerificationRule(rule)))
        stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(self._sessions, prompt, sampling, stop, speculation)
        return self._loop.run(request, self._method if speculation.enabled else None, self._k)


def parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.acceptance", __doc__)
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
    """Measure all rules at all temperatures."""
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
        samples: dict[str, list[Outcome]] = {name: [] for name in names}
        for seed, prompt in enumerate(loaded.token_ids):
            sampling = SamplingParams(temperature, seed=seed)
            turn = seed % len(names)
            for name in (*names[turn:], *names[:turn]):
                samples[name].append(pair.run(prompt, sampling, args.max_tokens, name))
            print(f"temperature {temperature:g}: prompt {seed + 1}", file=sys.stderr, flush=True)
        rows += [row(temperature, name, samples[name], samples[NONE]) for name in names]
        found = {"machine": machine, "settings": settings, "rows": [asdict(each) for each in rows]}
        command = report.command("benchmarks.acceptance")
        text = "\n".join(document(rows, command, machine | settings))
        report.write(found, text, args.out / "acceptance")  # so far
    print(text)
    return 0


def row(temperature: float, rule: str, samples: Sequence[Outcome], plain: Sequence[Outcome]) -> Row:
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
        equal=sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs),
    )


def document(rows: Sequence[Row], command: str, facts: Mapping[str, object]) -> list[str]:
    """Return the report, by lines."""
    head = ["T and rule", "acceptance", "length", "tok/round", "tok/s", "speed-up", "equal"]
    body = [
        [
            f"{r.temperature:g} {r.rule}",
            "" if r.acceptance is None else f"{r.acceptance:.1%}",
            report.number(r.length),
            f"{r.tokens_per_round:.2f}",
            f"{r.tokens_per_s:.1f}",
            f"{r.speed_up:.2f}",
            f"{r.equal:.0%}",
        ]
        for r in rows
    ]
    title = "Acceptance by verification rule"
    return [*report.head(title, command, facts), *report.table(head, body), ""]


if __name__ == "__main__":
    sys.exit(main())
