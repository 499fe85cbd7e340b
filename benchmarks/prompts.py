"""The prompts: held-out code, tokenised once, the same ids for every system."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.records import TokenIds

MIN_PROMPT_TOKENS = 16
HELD_OUT = Path(str(resources.files("outrider.models"))) / "data" / "heldout_prompts.jsonl"


class PromptsError(Exception):
    """The file of prompts cannot be used."""


@dataclass(frozen=True)
class Prompts:
    """Prompts in file order, and where they come from."""

    token_ids: tuple[TokenIds, ...]
    file: str
    sha256: str

    def group(self, index: int, size: int) -> tuple[TokenIds, ...]:
        """The `index`-th group of `size` prompts, going round when the file ends."""
        n = len(self.token_ids)
        return tuple(self.token_ids[(index * size + i) % n] for i in range(size))


def load(file: Path | None, model: Path, *, count: int, max_prompt_tokens: int) -> Prompts:
    """The first `count` prompts of a JSON-lines file ({"prompt": ...} per line) as token ids.

    None: the held-out prompts that come with the embedded models.
    Long prompts keep their last `max_prompt_tokens` tokens; those under 16 tokens are left out,
    and so are repeats. Raises `PromptsError`.
    """
    file = file or HELD_OUT
    if not file.is_file():
        raise PromptsError(f"{file} does not exist: give a file of held-out prompts (--prompts).")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    raw = file.read_bytes()
    chosen: dict[TokenIds, None] = {}
    for line in raw.decode().splitlines():
        ids = tuple(tokenizer.encode(json.loads(line)["prompt"]).ids)
        if len(ids) >= MIN_PROMPT_TOKENS:
            chosen.setdefault(ids[-max_prompt_tokens:])
        if len(chosen) == count:
            break
    if not chosen:
        raise PromptsError(f"{file} holds no prompt of {MIN_PROMPT_TOKENS} tokens or more.")
    return Prompts(tuple(chosen), file.name, hashlib.sha256(raw).hexdigest())


def repetition(token_ids: Sequence[TokenIds]) -> float:
    """The share of 8-grams that occurred earlier in the same output.

    Greedy text of small models loops, and loops are easy to draft: the report says how much.
    """
    seen_before = total = 0
    for ids in token_ids:
        grams = [ids[i : i + 8] for i in range(len(ids) - 7)]
        seen_before += len(grams) - len(set(grams))
        total += len(grams)
    return seen_before / total if total else 0.0
