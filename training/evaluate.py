"""Measure losses on held-out packages and the draft's acceptance, greedy and with coupled noise.

With greedy and coupled sampling the emitted text is the target's own, and a draft chain equals it
for as long as it is accepted. One teacher-forced pass of the draft over the target's text therefore
gives the proposed token at every position, and rounds are replayed from these tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.train.data import read_tokens
from outrider.train.evaluate import replay
from outrider.train.target import Target, continue_rows, gumbel_noise, load_target
from training.train_target import Logits, heldout_loss


@torch.no_grad()
def acceptance(
    target: Target, draft: Logits, prompts: Tensor, new: int, temperature: float
) -> dict[str, Any]:
    """Return the acceptance on the target's continuations, with the same noise for both."""
    rows, length = prompts.shape
    generator = torch.Generator(prompts.device)
    temperatures = torch.full((rows,), temperature, device=prompts.device)
    text = continue_rows(target, prompts, new, temperatures, generator.manual_seed(0))
    logits = torch.cat([draft(part[:, :-1])[:, length - 1 :] for part in torch.split(text, 64)])
    generator.manual_seed(0)
    match = []
    for position in range(new):
        guess = logits[:, position].float()
        if temperature > 0:
            guess = guess + temperature * gumbel_noise(guess, generator)
        match.append(guess.argmax(-1) == text[:, length + position])
    matches = torch.stack(match, -1).int().cpu()  # [rows, position]: a chain's guess is the same
    result = {f"K={k}": asdict(replay(matches.unfold(1, k, 1))) for k in (1, 2, 4, 8)}
    return {"agreement": float(matches.float().mean()), **result}


def main() -> None:
    """Print and save all numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the token streams")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help=".json file to write")
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, draft = (
        load_target(path, device, torch.bfloat16) for path in (args.target, args.draft)
    )
    heldout = torch.from_numpy(read_tokens(args.data / "heldout.bin", None).astype(np.int64))
    report = json.loads((args.data / "report.json").read_text())
    bytes_per_token = report["heldout_bytes"] / len(heldout)
    prompts = torch.from_numpy(np.load(args.data / "prompts.npy")).to(device)
    result: dict[str, Any] = {"bytes_per_token": bytes_per_token, "corpus": report}
    for name, model in (("target", target), ("draft", draft)):
        loss = heldout_loss(model.logits, heldout.to(device), 2048, 10_000)
        bits = loss / math.log(2) / bytes_per_token
        result[name] = {"nats_per_token": loss, "bits_per_byte": bits}
    result["prompts"] = len(prompts)
    result["greedy"] = acceptance(target, draft.logits, prompts, args.new, 0.0)
    result["coupled_T1"] = acceptance(target, draft.logits, prompts, args.new, 1.0)
    text = json.dumps(result, indent=1)
    args.out.write_text(text)
    print(text, flush=True)


if __name__ == "__main__":
    main()
