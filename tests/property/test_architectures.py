"""Every architecture says token for token what `transformers` generates."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from outrider.draft_tree import chain_parents
from outrider.engine.batch import Model, RowSlice, pack
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.errors import UnsupportedModelError
from tests.support.models.architectures import ARCHITECTURES, REFUSED, VOCAB_SIZE, random_model
from tests.support.models.verification import verify_tree

PAGE_SIZE = 4
NUM_PAGES = 64
PROMPT_LENS = (3, 21, 38)
NEW_TOKENS = 20


def _prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in PROMPT_LENS]


def _generate(model: Any, prompt: list[int]) -> list[int]:
    model.set_attn_implementation("eager")
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _tree(ahead: list[int], rng: random.Random) -> tuple[list[int], tuple[int, ...]]:
    """A tree in which the right path lies scattered, with wrong siblings and wrong children."""
    tokens: list[int] = []
    parents: list[int] = []
    right = -1  # the node that the right path has reached
    for token in ahead:
        for _ in range(rng.randrange(3)):
            parents.append(rng.randint(-1, len(tokens) - 1))
            tokens.append((token + rng.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE)
        parents.append(right)
        right = len(tokens)
        tokens.append(token)
    return tokens, tuple(parents)


def _serve(model: Model, prompts: list[list[int]], truth: list[list[int]]) -> list[list[int]]:
    """Greedy decoding as the engine does it: chunks, drafts right and wrong, scattered pages."""
    rng = random.Random(11)
    free = list(range(NUM_PAGES))
    rng.shuffle(free)
    pages = -(-(max(PROMPT_LENS) + NEW_TOKENS + 12) // PAGE_SIZE)
    tables = [[free.pop() for _ in range(pages)] for _ in prompts]
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    lengths = [len(prompt) + NEW_TOKENS for prompt in prompts]
    while any(len(k) < n for k, n in zip(known, lengths, strict=True)):
        rows, live, drafts = [], [], []
        for i, tokens in enumerate(known):
            if len(tokens) >= lengths[i] or (computed[i] and rng.random() < 0.2):
                continue  # finished, or sits this step out
            left = len(tokens) - computed[i]
            draft: list[int] = []
            parents: tuple[int, ...] = ()
            if left == 1:  # decoding: guess up to 4 tokens, each right with probability 0.7
                ahead = truth[i][len(tokens) - len(prompts[i]) :][: rng.randrange(5)]
                draft = [t if rng.random() < 0.7 else (t + 1) % VOCAB_SIZE for t in ahead]
                if rng.random() < 0.5:
                    draft, parents = _tree(ahead, rng)
            size = min(left, rng.choice((2, 5, 18)))
            chunk = tokens[computed[i] : computed[i] + size] + draft
            last = computed[i] + size == len(tokens)
            num_logits = len(draft) + 1 if last else 0
            rows.append(RowSlice(chunk, computed[i], tables[i], num_logits, parents))
            live.append((i, size, last))
            drafts.append(draft)
        if not rows:
            continue
        logits = model.forward(pack(rows, PAGE_SIZE, model.device))
        best = logits.argmax(dim=-1).tolist()
        for (i, size, last), draft, row in zip(live, drafts, rows, strict=True):
            computed[i] += size
            if not last:
                continue
            outputs = [best.pop(0) for _ in range(len(draft) + 1)]
            path = verify_tree(draft, row.parents or chain_parents(len(draft)), outputs)
            slots = [page * PAGE_SIZE + offset for page in tables[i] for offset in range(PAGE_SIZE)]
            source = [slots[computed[i] + node] for node in path]
            target = slots[computed[i] : computed[i] + len(path)]
            model.move_slots(torch.tensor(source).long(), torch.tensor(target).long())
            computed[i] += len(path)
            known[i] += [outputs[node + 1] for node in (-1, *path)]
    return [
        tokens[len(prompt) : len(prompt) + NEW_TOKENS]
        for tokens, prompt in zip(known, prompts, strict=True)
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_when_served_equals_generate(name: str) -> None:
    prompts = _prompts()
    model = random_model(ARCHITECTURES[name], torch.float64)
    truth = [_generate(model, prompt) for prompt in prompts]
    assert len({token for tokens in truth for token in tokens}) > 5, "a text that says something"
    for fused in (True, False):
        again = random_model(ARCHITECTURES[name], torch.float64)
        paged = build_paged_model(
            again, ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, fused=fused)
        )
        assert _serve(paged, prompts, truth) == truth


@pytest.mark.parametrize("name", REFUSED)
def test_build_paged_model_of_unsupported_architecture_gives_reason(name: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        build_paged_model(build(), ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES))
