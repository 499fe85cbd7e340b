"""Measure what 8-bit weights and caches cost in quality, beside the target without them.

    python -m benchmarks.quantization [--model FOLDER] [--device cuda --dtype bfloat16]

nats per token: of the held-out prompts' text. Agreement: the share of tokens of the unrounded
target's greedy continuations that the rounded one would choose, too, after the same text.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path

from benchmarks.lib import prompts, report
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.program import arguments, guarded, say
from outrider import LLM, SamplingParams
from outrider.config import KV_CACHE_DTYPES, QUANTIZATIONS
from outrider.models.resolve import resolve_model

_ROWS = 16  # at a time


@dataclass(frozen=True)
class Row:
    """One kind of weights over one kind of cache."""

    weights: str
    kv_cache_dtype: str
    nats_per_token: float
    more_nats: float  # than without rounding
    agreement: float


@dataclass(frozen=True)
class Scores:
    """The scores of one model over all texts."""

    nats: float  # per token of the prompts
    choices: list[list[int]]  # the likeliest token after each token, by text


def parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.quantization", __doc__)
    p.add_argument("--model", default="embedded", help="a target of 16 bits")
    p.add_argument("--prompts", type=Path, help="JSON lines; default: the embedded model's")
    p.add_argument("--num-prompts", type=int, default=64)
    p.add_argument("--max-prompt-tokens", type=int, default=256)
    p.add_argument("--max-tokens", type=int, default=32, help="of a greedy continuation")
    p.add_argument("--quantization", choices=QUANTIZATIONS, nargs="*", default=[*QUANTIZATIONS])
    caches = [*KV_CACHE_DTYPES]
    p.add_argument("--kv-cache-dtype", choices=caches, nargs="+", default=caches)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", type=Path, default=Path("benchmarks/results/quantization"))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 2 if it could not run."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    folder = resolve_model(args.model, "target")
    limits = {"count": args.num_prompts, "max_prompt_tokens": args.max_prompt_tokens}
    held_out = prompts.load(args.prompts, folder, **limits)
    starts = [list(ids) for ids in held_out.token_ids]

    def load(quantization: str, kv_cache_dtype: str) -> LLM:
        say(f"loading with quantization {quantization}, cache {kv_cache_dtype}")
        same = {"dtype": args.dtype, "device": args.device, "max_num_seqs": _ROWS}
        rounded = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
        return LLM(str(folder), enable_prefix_caching=False, **same, **rounded)

    own = ("none", KV_CACHE_DTYPES[0])
    with load(*own) as plain:
        texts = continued(plain, starts, args.max_tokens)
        wanted = scores(plain, texts, starts)
    table = [Row(args.dtype, own[1], wanted.nats, 0.0, 1.0)]
    for name, cache in product(("none", *args.quantization), args.kv_cache_dtype):
        if (name, cache) != own:
            with load(name, cache) as rounded:
                found = scores(rounded, texts, starts)
            weights, more = args.dtype if name == "none" else name, found.nats - wanted.nats
            table.append(Row(weights, cache, found.nats, more, agreement(wanted, found)))
    head = ["weights", "KV cache", "nats per token", "more", "perplexity", "greedy agreement"]
    lines = [
        [
            *(row.weights, row.kv_cache_dtype, f"{row.nats_per_token:.4f}"),
            *(f"{row.more_nats:+.4f}", f"{math.exp(row.nats_per_token):.3f}"),
            f"{100 * row.agreement:.1f} %",
        ]
        for row in table
    ]
    report.publish(
        "Quality of 8-bit weights and caches",
        "benchmarks.quantization",
        report.table(head, lines),
        [asdict(row) for row in table],
        args.out,
        gpu=gpu_name(),
        prompts=f"{len(starts)} of {held_out.file}",
        prompt_tokens=sum(map(len, starts)),
        max_tokens=args.max_tokens,
    )
    return 0


def continued(model: LLM, starts: Sequence[list[int]], new: int) -> list[list[int]]:
    """Return each prompt with `new` tokens of the model's greedy continuation."""
    greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    outputs = model.generate(starts, greedy, use_tqdm=False)
    return [output.prompt_token_ids + list(output.outputs[0].token_ids) for output in outputs]


def scores(model: LLM, texts: Sequence[list[int]], starts: Sequence[list[int]]) -> Scores:
    """Return the loss on the prompts, and the likeliest next tokens in their continuations."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    losses: list[float] = []
    choices: list[list[int]] = []
    outputs = model.generate(texts, params, use_tqdm=False)
    for text, start, output in zip(texts, starts, outputs, strict=True):
        likely = [each or {} for each in output.prompt_logprobs or ()]  # by token, its own too
        losses += [-likely[i][text[i]].logprob for i in range(1, len(start))]
        choices.append(
            [token for each in likely[len(start) :] for token, one in each.items() if one.rank == 1]
        )
    return Scores(statistics.fmean(losses), choices)


def agreement(wanted: Scores, found: Scores) -> float:
    """Return the share of equal choices."""
    pairs = list(zip(chain(*wanted.choices), chain(*found.choices), strict=True))
    return sum(a == b for a, b in pairs) / len(pairs)


if __name__ == "__main__":
    sys.exit(main())
