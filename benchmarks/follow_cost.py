"""What speculation costs where it does not pay: requests that nobody drafts for, followed or not.

    python -m benchmarks.follow_cost            # about five minutes on two cores

One stack, 16 requests at a time: on few cores the policy soon finds that drafts cost more than they
give, and proposers merely follow (Commit.num_draft_tokens = 0). Turns with speculation allowed and
turns with speculation off decode the same prompts, in an order that changes; a ratio is the median
of the turns' ratios, with the range of the middle half of turns and a 90% interval of the median.
CPU is each process's own time, user and system, per token of output: on a machine with other work
it is the steadier of the two; that of an event loop, without a model's threads that spin, the
steadiest. `--fixed-k-zero` leaves out what trying costs: an engine whose policy
never drafts shows what following alone costs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import prompts
from benchmarks.outrider_stack import METHODS, Job, Stack, StackConfig
from benchmarks.processes import Child, stopping
from benchmarks.program import guarded
from benchmarks.telemetry_cost import interval
from outrider.models.resolve import resolve_model

_WARM_UP_TURNS = 2  # the policy finds out


@dataclass
class Arm:
    """One way of asking: its turns."""

    method: str  # "none": speculation off
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)  # per token, by process
    loop_us: dict[str, list[float]] = field(default_factory=dict)  # of that: its event loop's
    undrafted: list[float] = field(default_factory=list)  # share of rounds

    @property
    def total_us(self) -> list[float]:
        """CPU of all processes together, per turn."""
        return [sum(turn) for turn in zip(*self.cpu_us.values(), strict=True)]

    def turn(
        self,
        stack: Stack,
        children: Sequence[Child],
        group: Sequence[tuple[int, ...]],
        max_tokens: int,
        *,
        counts: bool,
    ) -> None:
        """Decode a group of prompts, all at once."""
        before = [_used(child) for child in children]
        jobs = [Job(prompt, max_tokens) for prompt in group]
        done, seconds = stack.generate(jobs, len(jobs), method=self.method, timeout_s=300)
        if not counts:
            return
        tokens = sum(len(completion.token_ids) for completion in done)
        rounds = sum(completion.stats["rounds"] for completion in done)
        undrafted = sum(completion.stats["undrafted_rounds"] for completion in done)
        self.tokens_per_s.append(tokens / seconds)
        self.undrafted.append(undrafted / rounds)
        for child, then in zip(children, before, strict=True):
            name = child.name.rpartition("32-")[2]
            for us, now, start in zip((self.cpu_us, self.loop_us), _used(child), then, strict=True):
                us.setdefault(name, []).append((now - start) * 1e6 / tokens)


def _used(child: Child) -> tuple[float, float]:
    """CPU seconds of a service and of its event loop, which is its first thread."""
    return child.cpu_seconds(), child.cpu_seconds(main_thread=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 2 if a service failed."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--seconds", type=float, default=240.0, help="of measuring")
    p.add_argument("--max-tokens", type=int, default=160, help="of a completion")
    p.add_argument("--at-once", type=int, default=16, help="requests at a time")
    p.add_argument("--method", choices=METHODS, default="draft_model")
    p.add_argument("--fixed-k-zero", action="store_true", help="the policy never drafts")
    args = p.parse_args(argv)
    config = StackConfig(
        model="embedded",
        draft_model="embedded",
        dtype="float32",
        num_speculative_tokens=4,
        scorer_threads=2,
        proposer_threads=1,
        start_timeout_s=120.0,
        methods=(args.method,),
        wrapper=("benchmarks.k_zero",) if args.fixed_k_zero else (),
    )
    return guarded(lambda: _run(config, args))


def _run(config: StackConfig, args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder, stopping([]) as children:
        stack = Stack(config, children, Path(folder))
        try:
            stack.require_proposers()
            arms = measure(stack, children, args)
        finally:
            stack.close()
    report(*arms)
    return 0


def measure(stack: Stack, children: Sequence[Child], args: argparse.Namespace) -> tuple[Arm, Arm]:
    """Take turns until the time is over."""
    known = prompts.load(None, resolve_model("embedded", "target"), count=48, max_prompt_tokens=64)
    arms = (Arm("none"), Arm(args.method))
    rng, deadline, turn = random.Random(0), 0.0, 0
    while turn <= _WARM_UP_TURNS or time.monotonic() < deadline:
        if turn == _WARM_UP_TURNS:
            deadline = time.monotonic() + args.seconds
        group = known.group(turn, args.at_once)
        for arm in rng.sample(arms, len(arms)):
            counts = turn >= _WARM_UP_TURNS
            arm.turn(stack, children, group, args.max_tokens, counts=counts)
        turn += 1
    return arms


def report(off: Arm, on: Arm) -> None:
    """CPU by process, and the ratios."""
    print(f"{statistics.mean(on.undrafted):.1%} of the rounds had no draft\n")
    print("| process | CPU us per token, speculation off | allowed | event loop, off | allowed |")
    print("|---|---|---|---|---|")
    for name in off.cpu_us:
        parts = (off.cpu_us, on.cpu_us, off.loop_us, on.loop_us)
        us = [statistics.median(part[name]) for part in parts]
        print(f"| {name} | {' | '.join(f'{each:.0f}' for each in us)} |")
    more = [100 * (b / a - 1) for a, b in zip(off.total_us, on.total_us, strict=True)]
    ratios = [100 * b / a for a, b in zip(off.tokens_per_s, on.tokens_per_s, strict=True)]
    speeds = " to ".join(f"{statistics.median(arm.tokens_per_s):.1f}" for arm in (off, on))
    print(f"\nCPU per token more, %: {interval(more)}")
    print(f"tokens/s of those with speculation off, %: {interval(ratios)}; {speeds}")


if __name__ == "__main__":
    sys.exit(main())
