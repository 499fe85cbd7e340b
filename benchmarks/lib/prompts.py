"""Held-out prompts, tokenised once, with the same ids for every system."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.lib.records import TokenIds

MIN_PROMPT_TOKENS = 16
HELD_OUT = Path(str(resources.files("outrider.models"))) / "data" / "heldout_prompts.jsonl"


class PromptsError(Exception):
    """Raised for a file of prompts that cannot be used."""


@dataclass(frozen=True)
class Prompts:
    """Prompts in file order, with the name and hash of their file."""

    token_ids: tuple[TokenIds, ...]
    file: str
    sha256: str
    categories: tuple[str, ...] = ()  # of each prompt, "" where its line names none

    def group(self, index: int, size: int) -> tuple[TokenIds, ...]:
        """Return the `index`-th group of `size` prompts; the file repeats at its end."""
        n = len(self.token_ids)
        return tuple(self.token_ids[(index * size + i) % n] for i in range(size))


def load(file: Path | None, model: Path, *, count: int, max_prompt_tokens: int) -> Prompts:
    """Return the first `count` prompts of a JSON-lines file as token ids.

    Each line is {"prompt": ...}, perhaps with a "category". Without a file, the held-out prompts
    of the embedded models are used. Long prompts keep their last `max_prompt_tokens` tokens.
    Prompts under 16 tokens and repeats are left out. Raises `PromptsError`.
    """
    file = file or HELD_OUT
    if not file.is_file():
        raise PromptsError(f"{file} does not exist: give a file of held-out prompts (--prompts).")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    raw = file.read_bytes()
    chosen: dict[TokenIds, str] = {}
    for line in raw.decode().splitlines():
        fields = json.loads(line)
        ids = tuple(tokenizer.encode(fields["prompt"]).ids)
        if len(ids) >= MIN_PROMPT_TOKENS:
            chosen.setdefault(ids[-max_prompt_tokens:], fields.get("category", ""))
        if len(chosen) == count:
            break
    if not chosen:
        raise PromptsError(f"{file} holds no prompt of {MIN_PROMPT_TOKENS} tokens or more.")
    sha256 = hashlib.sha256(raw).hexdigest()
    return Prompts(tuple(chosen), file.name, sha256, tuple(chosen.values()))
