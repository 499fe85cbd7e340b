"""Train the target by plain language modelling, for a given time; resumable."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.train.data import Source, read_tokens
from outrider.train.optimiser import Muon, schedule
from training.config import TARGET, TINY_TARGET
from training.model import Llama

Logits = Callable[[Tensor], Tensor]
"""A model as a function of token ids, `[rows, n]` to `[rows, n, vocab]`."""


def loss_of(model: Logits, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    logits = model(batch[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: Logits, tokens: Tensor, length: int, windows: int) -> float:
    """Return the mean loss on the first windows of the held-out stream `tokens [n]`."""
    windows = min(windows, (len(tokens) - 1) // length)
    total = 0.0
    for start in range(0, windows, 16):
        rows = range(start, min(start + 16, windows))
        batch = torch.stack([tokens[r * length : (r + 1) * length + 1] for r in rows]).long()
        total += float(loss_of(model, batch)) * len(rows)
    return total / windows


def main() -> None:
    """Train for `--seconds` of a schedule that lasts `--total-seconds`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--total-seconds", type=float, required=True)
    parser.add_argument("--rows", type=int, default=128, help="sequences in a step")
    parser.add_argument("--micro", type=int, default=64, help="sequences in a forward pass")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--embed-lr", type=float, default=3e-3)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the code")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    checkpoint = args.out / "target.pt"
    config = TINY_TARGET if args.tiny else TARGET
    model = Llama(config).to(device)
    optimiser = Muon(model, ("embed",), args.lr, args.embed_lr)
    spent, step = 0.0, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimiser.load(saved["optimiser"])
        spent, step = saved["spent"], saved["step"]
    source = Source(read_tokens(args.data / "mixed.bin", None), args.length, seed=1)
    micro = min(args.micro, args.rows)
    parts = args.rows // micro

    def part_loss(batch: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            scaled: Tensor = loss_of(model, batch) / parts
            return scaled

    compiled = torch.compile(part_loss, disable=device.type == "cpu")
    begin = time.monotonic()
    log = begin
    print(f"parameters {sum(p.numel() for p in model.parameters()):,}", flush=True)
    while (elapsed := time.monotonic() - begin) < args.seconds:
        batch = source.rows(step * args.rows, args.rows).to(device)
        total = torch.zeros((), device=device)
        for part in torch.split(batch, micro):
            loss = compiled(part)
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step(schedule((spent + elapsed) / args.total_seconds, decay=0.6))
        step += 1
        if step % 50 == 0 or step in (1, 5, 20):
            now = float(total), time.monotonic()
            print(
                f"step {step} loss {now[0]:.4f} tokens {step * args.rows * args.length / 1e6:.1f}M"
                f" elapsed {spent + now[1] - begin:.0f}s"
                f" since last {now[1] - log:.1f}s",
                flush=True,
            )
            log = now[1]
    spent += time.monotonic() - begin
    heldout = torch.from_numpy(read_tokens(args.data / "heldout.bin", None).astype(np.int64))
    with torch.autocast(device.type, torch.bfloat16):
        held = heldout_loss(model, heldout.to(device), args.length, 256)
    facts = {
        "spent": spent,
        "step": step,
        "tokens": step * args.rows * args.length,
        "corpus_tokens": len(source.tokens),
        "heldout_loss": held,
    }
    print("target", json.dumps(facts), flush=True)
    state = {
        "config": asdict(config),
        "model": model.state_dict(),
        "optimiser": optimiser.state(),
        **facts,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    torch.save(state, checkpoint)
    (args.out / "target.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
