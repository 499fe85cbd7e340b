"""Measure what 8-bit weights cost in quality, beside the same target with its own weights.

    python -m benchmarks.quantization [--model FOLDER] [--device cuda --dtype bfloat16]

nats per token: of the held-out prompts' text. Agreement: the share of tokens of the unrounded
target's greedy continuations that the rounded one would choose, too, after the same text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.lib import prompts, report
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.program import arguments, guarded, say
from outrider.config import QUANTIZATIONS
from outrider.engine.batch import RowSlice, pack
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.engine.model.paged_model import PagedModel
from outrider.models.resolve import resolve_model

PAGE_SIZE = 16
_ROWS = 16  # at a time


@dataclass(frozen=True)
class Row:
    """One kind of weights."""

    weights: str
    nats_per_token: float
    more_nats: float  # than without rounding
    agreement: float


@dataclass(frozen=True)
class Scores:
    """The scores of one model over all texts."""

    nats: float  # per token of the prompts
    choices: list[list[int]]  # the likeliest token after each token, by text


def main() -> int:
    """Measure, print and write the table."""
    p = arguments("benchmarks.quantization", __doc__)
    p.add_argument("--model", default="embedded", help="a target of 16 bits")
    p.add_argument("--prompts", type=Path, help="JSON lines; default: the embedded model's")
    p.add_argument("--num-prompts", type=int, default=64)
    p.add_argument("--max-prompt-tokens", type=int, default=256)
    p.add_argument("--max-tokens", type=int, default=32, help="of a greedy continuation")
    p.add_argument("--quantization", choices=QUANTIZATIONS, nargs="+", default=[*QUANTIZATIONS])
    p.add_argument("--dtype", default="float32")
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", type=Path, default=Path("benchmarks/results/quantization"))
    args = p.parse_args()
    folder = resolve_model(args.model, "target")
    limits = {"count": args.num_prompts, "max_prompt_tokens": args.max_prompt_tokens}
    held_out = prompts.load(args.prompts, folder, **limits)
    starts = [list(ids) for ids in held_out.token_ids]
    longest = max(map(len, starts)) + args.max_tokens

    def load(quantization: str | None) -> PagedModel:
        say(f"loading with {quantization or 'its own'} weights")
        options = ModelOptions(
            page_size=PAGE_SIZE,
            num_pages=_ROWS * -(-longest // PAGE_SIZE),
            quantization=quantization,
        )
        dtype, device = getattr(torch, args.dtype), torch.device(args.device)
        return load_model(folder, options, dtype=dtype, device=device)

    plain = load(None)
    texts = continued(plain, starts, args.max_tokens)
    wanted = scores(plain, texts, starts)
    del plain
    table = [Row(args.dtype, wanted.nats, 0.0, 1.0)]
    for name in args.quantization:
        found = scores(load(name), texts, starts)
        table.append(Row(name, found.nats, found.nats - wanted.nats, agreement(wanted, found)))
    setup = {
        **report.machine(),
        "gpu": gpu_name(),
        "command": report.command("benchmarks.quantization"),
        "prompts": f"{len(starts)} of {held_out.file}",
        "prompt_tokens": sum(map(len, starts)),
        "max_tokens": args.max_tokens,
    }
    head = ["weights", "nats per token", "more", "perplexity", "greedy agreement"]
    lines = [
        [
            row.weights,
            f"{row.nats_per_token:.4f}",
            f"{row.more_nats:+.4f}",
            f"{math.exp(row.nats_per_token):.3f}",
            f"{100 * row.agreement:.1f} %",
        ]
        for row in table
    ]
    about = [f"{key} {setup[key]}" for key in ("date", "commit", "gpu", "torch", "prompts")]
    intro = ["# Quality of 8-bit weights", "", f"`{setup['command']}`", "", "; ".join(about), ""]
    text = "\n".join([*intro, *report.table(head, lines), ""])
    print(text)
    report.write({"setup": setup, "results": [asdict(row) for row in table]}, text, args.out)
    return 0


def continued(model: PagedModel, starts: Sequence[list[int]], new: int) -> list[list[int]]:
    """Return each prompt with `new` tokens of the model's greedy continuation."""
    texts: list[list[int]] = []
    for first in range(0, len(starts), _ROWS):
        rows = [list(ids) for ids in starts[first : first + _ROWS]]
        done = [0] * len(rows)
        for _ in range(new):
            slices = [
                RowSlice(row[n:], n, _table(model, i), 1)
                for i, (row, n) in enumerate(zip(rows, done, strict=True))
            ]
            chosen = model.forward(pack(slices, PAGE_SIZE, model.device)).argmax(-1).tolist()
            done = [len(row) for row in rows]
            for row, token in zip(rows, chosen, strict=True):
                row.append(token)
        texts += rows
    return texts


def scores(model: PagedModel, texts: Sequence[list[int]], starts: Sequence[list[int]]) -> Scores:
    """Return the loss on the prompts, and the likeliest next tokens in their continuations."""
    losses: list[Tensor] = []
    choices: list[list[int]] = []
    for text, start in zip(texts, starts, strict=True):
        row = RowSlice(text[:-1], 0, _table(model, 0), len(text) - 1)
        logits = model.forward(pack([row], PAGE_SIZE, model.device))
        targets = torch.tensor(start[1:], device=logits.device)
        of_prompt = logits[: len(start) - 1].log_softmax(-1)
        losses.append(-of_prompt.gather(1, targets[:, None])[:, 0].cpu())
        choices.append(logits[len(start) - 1 :].argmax(-1).tolist())
    return Scores(float(torch.cat(losses).double().mean()), choices)


def agreement(wanted: Scores, found: Scores) -> float:
    """Return the share of equal choices."""
    same = [
        a == b
        for texts in zip(wanted.choices, found.choices, strict=True)
        for a, b in zip(*texts, strict=True)
    ]
    return sum(same) / len(same)


def _table(model: PagedModel, row: int) -> list[int]:
    pages = model.num_pages // _ROWS
    return list(range(row * pages, (row + 1) * pages))


if __name__ == "__main__":
    sys.exit(guarded(main))
