"""Losses on held-out packages and the acceptance of the draft, greedy and with coupled noise.

Under coupled sampling (and under greedy) the emitted text is the target's own, and a draft chain
equals it for as long as it is accepted. So one teacher-forced pass of the draft over the target's
text tells at every position whether the draft would have proposed the emitted token, and rounds
can be replayed from that alone.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.config import DRAFT, TARGET, TINY_DRAFT, TINY_TARGET
from training.data import load_tokens
from training.model import Llama, generate
from training.train_target import heldout_loss
from training.weights import load


def replay(match: Tensor, drafted: int) -> dict[str, Any]:
    """Play rounds of `drafted` tokens over `match[row, position]`."""
    rounds = accepted_total = 0
    reached = [0] * drafted
    for row in match.tolist():
        at = 0
        while at + drafted < len(row):  # only rounds that fit wholly
            accepted = 0
            while accepted < drafted and row[at + accepted]:
                reached[accepted] += 1
                accepted += 1
            rounds += 1
            accepted_total += accepted
            at += accepted + 1
    before = [rounds, *reached[:-1]]
    return {
        "rounds": rounds,
        "mean_acceptance_length": 1 + accepted_total / rounds,
        "reached": [n / rounds for n in reached],
        "conditional": [n / max(1, b) for n, b in zip(reached, before, strict=True)],
    }


@torch.no_grad()
def acceptance(
    target: Llama, draft: Llama, prompts: Tensor, new: int, temperature: float
) -> dict[str, Any]:
    """Acceptance on the target's continuations of the prompts."""
    rows, length = prompts.shape
    noise = None
    scale = torch.full((rows,), temperature, device=prompts.device)
    if temperature > 0:
        shape = (new, rows, target.config.vocab)
        noise = -torch.empty(shape, device=prompts.device).exponential_().log()
    text = generate(target, prompts, new, scale if noise is not None else None, noise)
    match = []
    for i in range(0, rows, 64):
        logits = draft(text[i : i + 64, :-1])[:, length - 1 :].float()
        if noise is not None:
            logits = logits + temperature * noise[:, i : i + 64].transpose(0, 1)
        match.append(logits.argmax(-1) == text[i : i + 64, length:])
    matches = torch.cat(match).cpu()
    result = {f"K={k}": replay(matches, k) for k in (1, 2, 4, 8)}
    return {"agreement": float(matches.float().mean()), **result}


def main() -> None:
    """Print and save all numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    models = []
    for name, config in (
        ("target", TINY_TARGET if args.tiny else TARGET),
        ("draft", TINY_DRAFT if args.tiny else DRAFT),
    ):
        models.append(load(args.out / f"{name}.pt", config, device))
    target, draft = models
    heldout = load_tokens(args.data / "heldout.bin", device)
    report = json.loads((args.data / "report.json").read_text())
    bytes_per_token = report["heldout_bytes"] / len(heldout)
    prompts = torch.from_numpy(np.load(args.data / "prompts.npy")).to(device)
    result: dict[str, Any] = {"bytes_per_token": bytes_per_token, "corpus": report}
    for name, model in (("target", target), ("draft", draft)):
        loss = heldout_loss(model, heldout, 2048, 10_000)
        bits = loss / math.log(2) / bytes_per_token
        result[name] = {"nats_per_token": loss, "bits_per_byte": bits}
        result[name].update(json.loads((args.out / f"{name}.json").read_text()))
    result["prompts"] = len(prompts)
    result["greedy"] = acceptance(target, draft, prompts, args.new, 0.0)
    result["coupled_T1"] = acceptance(target, draft, prompts, args.new, 1.0)
    text = json.dumps(result, indent=1)
    (args.out / "evaluation.json").write_text(text)
    print(text, flush=True)


if __name__ == "__main__":
    main()
