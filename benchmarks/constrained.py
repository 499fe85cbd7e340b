"""What masking drafts brings to constrained requests, and what masks cost.

    python -m benchmarks.constrained [--max-tokens 150]

The first table: the embedded pair in one process, taking turns, no branches ahead; two JSON schemas
on four prompts each, with the draft model masked and not. Both write the same text, which is
checked, so what differs is the tokens that a round commits. The second: CPU time of one thread for
masks of the embedded vocabulary, over the tokens of one document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.config import EngineConfig
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.masks import DraftMasks
from outrider.drafting.proposer import SessionStart
from outrider.engine.engine import Engine
from outrider.engine.model.loader import load_model
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.policy.base import Policy
from outrider.engine.sampling.constraint import ConstraintCompiler
from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import Tokenizer
from outrider.params import Constraint, ConstraintKind, SamplingParams, StopParams, TokenIds
from outrider.types import Request

PAGE_SIZE, NUM_PAGES = 16, 256
PROMPTS = (
    "Return a JSON object that describes the request:\n",
    "def parse_config(path):\n    # example:\n    example = ",
    "Here is the record of the first user as JSON:\n",
    "# tool call\n",
)


def object_of(**properties: object) -> dict[str, object]:
    """The schema of an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TAGS = {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4}
PERSON = object_of(
    name={"type": "string", "maxLength": 30},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    email={"type": "string", "maxLength": 40},
    tags=TAGS,
)
CALL = object_of(
    tool_name={"enum": ["search_documents", "create_ticket", "send_message"]},
    arguments=object_of(
        query={"type": "string", "maxLength": 60},
        max_results={"type": "integer", "minimum": 1, "maximum": 50},
        include_archived={"type": "boolean"},
    ),
)
DOCUMENT = '{"name": "Ada Lovelace", "age": 36, "email": "ada@example.com", "tags": ["a", "bc"]}'


@dataclass(frozen=True)
class Pair:
    """The embedded models and what compiles constraints for their tokenizer."""

    target: PagedModel
    draft: PagedModel
    tokenizer: Tokenizer
    compiler: ConstraintCompiler

    @staticmethod
    def load() -> Pair:
        folder = resolve_model(None, "target")
        target, draft = (
            load_model(
                resolve_model(None, role),
                dtype=torch.float32,
                page_size=PAGE_SIZE,
                num_pages=NUM_PAGES,
                max_model_len=1024,
                device=torch.device("cpu"),
            )
            for role in ("target", "draft")
        )
        compiler = ConstraintCompiler.load(folder, target.vocab_size, target.eos_token_ids)
        return Pair(target, draft, Tokenizer.load(folder), compiler)


def decode(pair: Pair, request: Request, k: int, masks: DraftMasks | None) -> tuple[TokenIds, int]:
    """The output, and in how many rounds it came."""
    proposer = DraftModelProposer(pair.draft, name="draft", masks=masks)
    config = EngineConfig(
        page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_model_len=1024, num_speculative_tokens=k
    )
    eos = pair.target.eos_token_ids
    engine = Engine(pair.target, config, eos_token_ids=eos, policy=Policy(k, max_wait_s=0.0))
    assert request.constraint is not None
    prompt, constraint = request.prompt_token_ids, request.constraint
    engine.submit(request, pair.compiler.editor(request.constraint, request.stop))
    engine.set_drafting(request.session_id, "draft", k)
    start = SessionStart(prompt, request.sampling, k, 1024, constraint=constraint)
    proposer.open(request.session_id, start)
    committed = list(prompt)
    while True:
        for session, tree in proposer.draft([request.session_id]).drafts:
            engine.post_block(session, tree, "draft", 1)
        events = engine.step()
        assert events is not None
        for commit in events.commits:
            proposer.commit(commit.session_id, len(committed), commit.token_ids, k)
            committed += commit.token_ids
            if commit.stats is not None:
                return tuple(committed[len(prompt) :]), commit.stats.rounds


def compare(pair: Pair, temperature: float, k: int, max_tokens: int) -> tuple[float, float]:
    """Tokens per round without masks and with them."""
    masks = DraftMasks(pair.compiler)
    tokens, rounds = 0, [0, 0]
    for number, (schema, prompt) in enumerate(itertools.product((PERSON, CALL), PROMPTS)):
        request = Request(
            session_id=number,
            prompt_token_ids=tuple(pair.tokenizer.encode(prompt)),
            sampling=SamplingParams(temperature=temperature, seed=number),
            stop=StopParams(max_tokens=max_tokens),
            constraint=Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)),
        )
        texts = set()
        for masked in (False, True):
            text, needed = decode(pair, request, k, masks if masked else None)
            texts.add(text)
            rounds[masked] += needed
        assert len(texts) == 1, "a draft changed the text"
        tokens += len(text)
    return tokens / rounds[False], tokens / rounds[True]


def costs(pair: Pair, repeats: int = 20) -> dict[str, list[float]]:
    """Microseconds of CPU time, of every token of the document."""
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(PERSON))
    tokens = tuple(pair.tokenizer.encode(DOCUMENT))
    taken: dict[str, list[float]] = {}

    def measure(what: str, count: int, run: Callable[..., object], *args: object) -> None:
        began = time.thread_time()
        run(*args)
        taken.setdefault(what, []).append((time.thread_time() - began) / count * 1e6)

    for _ in range(repeats):
        editor = pair.compiler.editor(constraint, StopParams())
        for i, token in enumerate(tokens):
            draft = tokens[i : i + 4]
            logits = torch.zeros(len(draft) + 1, pair.target.vocab_size)
            measure("cutting a draft of 4", 1, editor.num_allowed, draft)
            measure("a row, with 4 drafts", len(logits), editor.edit, logits, draft)
            measure("following a token", 1, editor.commit, (token,))
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.constrained", description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=150)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    pair = Pair.load()
    print("| temperature | K | tokens per round, draft not masked | masked |\n|---|---|---|---|")
    for temperature, k in itertools.product((0.0, 1.0), (4, 8)):
        plain, masked = compare(pair, temperature, k, args.max_tokens)
        print(f"| {temperature:g} | {k} | {plain:.2f} | {masked:.2f} |", flush=True)
    print("\n| CPU time, us | median | 95th percentile |\n|---|---|---|")
    for what, values in costs(pair).items():
        high = statistics.quantiles(values, n=20)[-1]
        print(f"| {what} | {statistics.median(values):.0f} | {high:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
