"""Distil the draft from the target, on real text and on the target's own continuations."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from outrider.train.optimiser import Muon, schedule
from training.config import DRAFT, TARGET, TINY_DRAFT, TINY_TARGET
from training.data import Stream, training_stream
from training.model import Llama, generate
from training.weights import load


def own_text(target: Llama, stream: Stream, seconds: float, rows: int, new: int) -> Tensor:
    """Real prompts continued by the target: half of the rows greedy, half sampled at T = 1."""
    parts: list[Tensor] = []
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        prompts = stream.next(rows)[:, : stream.length]
        temperature = (torch.arange(rows, device=prompts.device) % 2).float()
        parts.append(generate(target, prompts, new, temperature).to(torch.int16))
    return torch.cat(parts)


def distance(target: Llama, draft: Llama, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, greedy agreement): forward KL, the target's first choice, total variation."""
    with torch.no_grad():
        wanted = target(ids).float()
        probs = wanted.softmax(-1)
        first = wanted.argmax(-1, keepdim=True)
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = draft(ids)
    log_draft = logits.float().log_softmax(-1)
    cross = -(probs * log_draft).sum(-1)
    hard = -log_draft.gather(-1, first)[..., 0]
    variation = 0.5 * (probs - log_draft.exp()).abs().sum(-1)
    agree = (log_draft.argmax(-1) == first[..., 0]).float().mean()
    return (cross + 0.5 * hard + 0.5 * variation).mean(), agree


def main() -> None:
    """Generate, then distil for `--seconds`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--own-seconds", type=float, default=16.0)
    parser.add_argument("--own-rows", type=int, default=2048, help="rows generated at a time")
    parser.add_argument("--rows", type=int, default=24, help="real sequences in a step")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--embed-lr", type=float, default=6e-3)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the code")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    target = load(args.out / "target.pt", TINY_TARGET if args.tiny else TARGET, device)
    prompts = training_stream(args.data, device, args.prompt, seed=77)
    own = own_text(target, prompts, args.own_seconds, args.own_rows, args.new)
    print(f"own text: {tuple(own.shape)}", flush=True)
    real = training_stream(args.data, device, args.length, seed=78)
    draft = Llama(TINY_DRAFT if args.tiny else DRAFT).to(device)
    optimiser = Muon(draft, ("embed",), args.lr, args.embed_lr)
    compiled = torch.compile(distance, disable=device.type == "cpu")
    own_rows = max(1, args.rows * args.length // own.shape[1])
    begin = log = time.monotonic()
    step = tokens = 0
    while (elapsed := time.monotonic() - begin) < args.seconds:
        batches = real.next(args.rows)[:, :-1], own[torch.randint(len(own), (own_rows,))].long()
        agreement = []
        for batch in batches:
            loss, agree = compiled(target, draft, batch.contiguous())
            torch.autograd.backward(loss / 2)
            agreement.append(agree)
            tokens += batch.numel()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimiser.step(schedule(elapsed / args.seconds, decay=0.7))
        step += 1
        if step % 100 == 0 or step in (1, 5, 20):
            now = time.monotonic()
            print(
                f"step {step} own loss {float(loss.detach()):.4f} "
                f"agreement real {float(agreement[0]):.4f} own {float(agreement[1]):.4f}"
                f" tokens {tokens / 1e6:.0f}M"
                f" since last {now - log:.1f}s",
                flush=True,
            )
            log = now
    facts = {
        "spent": time.monotonic() - begin,
        "step": step,
        "tokens": tokens,
        "own_sequences": len(own),
        "parameters": sum(p.numel() for p in draft.parameters()),
    }
    print("draft", json.dumps(facts), flush=True)
    torch.save({"model": draft.state_dict(), **facts}, args.out / "draft.pt")
    (args.out / "draft.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
