"""How often a drafter foresees the token after a verification: with the request's noise, without.

    python -m benchmarks.shared_noise [--temperature 1.0] [--num-prompts 16]

The target writes texts at a temperature; both models' logits over them are computed once. At every
position the drafter proposes a token, and ranks others. Three ways to draft and verify:

shared       the drafter adds the target's own Gumbel noise; accepted if equal (Outrider's way)
independent  the drafter draws with noise of its own; accepted if equal
rejection    the drafter draws on its own; accepted with chance min(1, p/q), else the target draws
             from the residual (Leviathan et al. 2023)

A branch hits if the token that follows is among the drafter's F likeliest: after a rejection, other
than the rejected one; after K accepted tokens in a row, of all. With noise the drafter ranks by
logit plus noise, without by probability.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import prompts
from benchmarks.records import TokenIds
from outrider.engine.sampling.coupled import gumbel_noise, seed_keys
from outrider.models.resolve import resolve_model

_FANOUTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Outcome:
    """One way at every position of a text: all [n]."""

    accepted: Tensor  # bool
    recovered: Tensor  # int64: the rank of the token that follows a rejection, among the others
    bonus: Tensor  # int64: its rank if this is the place after a fully accepted draft


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default="embedded")
    p.add_argument("--draft-model", default="embedded")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--num-prompts", type=int, default=16)
    p.add_argument("--max-tokens", type=int, default=96)
    p.add_argument("--num-speculative-tokens", type=int, default=4)
    args = p.parse_args()
    target_folder = resolve_model(args.model, "target")
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    draft_folder = resolve_model(args.draft_model, "draft")
    draft = AutoModelForCausalLM.from_pretrained(draft_folder, dtype=torch.float32).eval()
    loaded = prompts.load(None, target_folder, count=args.num_prompts, max_prompt_tokens=192)
    found: dict[str, list[Outcome]] = {}
    with torch.inference_mode():
        for seed, prompt in enumerate(loaded.token_ids):
            text = _write(target, prompt, args.max_tokens, args.temperature, seed)
            start = len(prompt)
            scaled = [
                model(torch.tensor([text])).logits[0, start - 1 : -1] / args.temperature
                for model in (target, draft)
            ]
            for name, outcome in _outcomes(scaled[0], scaled[1], text[start:], start, seed).items():
                found.setdefault(name, []).append(outcome)
    print(f"temperature {args.temperature}, {len(loaded.token_ids)} texts of {args.max_tokens}")
    for name, outcomes in found.items():
        print(f"{name:12} {_summary(outcomes, args.num_speculative_tokens)}")


def _write(model: Any, prompt: TokenIds, count: int, heat: float, seed: int) -> list[int]:
    """The prompt and `count` tokens, drawn as the scorer draws them."""
    text = list(prompt)
    cache: Any = None
    fed = text
    keys = seed_keys([seed])
    for _ in range(count):
        answer = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        logits = answer.logits[0, -1:] / heat
        noise = gumbel_noise(keys, torch.tensor([len(text)]), logits.shape[-1])
        fed = [int((logits + noise).argmax())]
        text += fed
    return text


def _outcomes(
    target: Tensor, draft: Tensor, truth: list[int], start: int, seed: int
) -> dict[str, Outcome]:
    """target, draft: logits over temperature [n, vocab] at positions `start`, ..."""
    n, vocab = target.shape
    positions = torch.arange(start, start + n)
    emitted = torch.tensor(truth)
    shared = draft + gumbel_noise(seed_keys([seed]).expand(n, 2), positions, vocab)
    own = draft + gumbel_noise(seed_keys([seed + 2**32]).expand(n, 2), positions, vocab)
    drawn = own.argmax(dim=-1)
    p, q = target.softmax(dim=-1).double(), draft.softmax(dim=-1).double()
    generator = torch.Generator().manual_seed(seed)
    chance = p.gather(1, drawn[:, None])[:, 0] / q.gather(1, drawn[:, None])[:, 0]
    kept = torch.rand(n, generator=generator, dtype=torch.float64) < chance
    residual = torch.multinomial((p - q).clamp(min=0) + 1e-30, 1, generator=generator)[:, 0]
    # After an accepted token the next one is the truth only where they agree; so a run of accepted
    # tokens is a run of the coin, and the token after it is drawn anew.
    bonus = torch.multinomial(p, 1, generator=generator)[:, 0]
    return {
        "shared": _ranked(shared, shared.argmax(dim=-1), emitted),
        "independent": _ranked(draft, drawn, emitted),
        "rejection": Outcome(kept, _rank(draft, residual, drawn), _rank(draft, bonus, None)),
    }


def _ranked(scores: Tensor, proposed: Tensor, emitted: Tensor) -> Outcome:
    recovered = _rank(scores, emitted, proposed)
    return Outcome(proposed == emitted, recovered, _rank(scores, emitted, None))


def _rank(scores: Tensor, tokens: Tensor, without: Tensor | None) -> Tensor:
    """How many tokens other than `without` score higher than `tokens` [n] in `scores` [n, v]."""
    if without is not None:
        scores = scores.scatter(1, without[:, None], -torch.inf)
    return (scores > scores.gather(1, tokens[:, None])).sum(dim=-1)


def _summary(outcomes: list[Outcome], k: int) -> str:
    accepted = torch.cat([o.accepted for o in outcomes])
    rejected = torch.cat([o.recovered[~o.accepted] for o in outcomes])
    after_all: list[Tensor] = []
    for o in outcomes:
        runs = o.accepted.unfold(0, k, 1).all(dim=1)[:-1]  # K accepted, and a position after them
        after_all.append(o.bonus[k:][runs])
    bonus = torch.cat(after_all)
    parts = [f"acceptance {accepted.float().mean():.3f}"]
    for name, ranks in (("after a rejection", rejected), (f"after {k} accepted", bonus)):
        shares = " ".join(f"F={f} {(ranks < f).float().mean():.3f}" for f in _FANOUTS)
        parts.append(f"{name} (n={len(ranks)}) {shares}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
