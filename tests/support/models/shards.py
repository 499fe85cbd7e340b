"""Generate texts with a whole model or, as a program, with shards of it.

`torchrun ... -m tests.support.models.shards OUT DTYPE FOLDER...`
writes the leader's texts to file OUT.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.model.loader import CPU, ModelOptions, load_model
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.model.parallel.ranks import RankGroup, Ranks
from outrider.errors import OutriderError
from outrider.params import SamplingParams, StopParams, TokenIds
from outrider.policy.fixed import FixedPolicy
from outrider.types import Request

K = 4
DEADLINE_S = 60.0
_PREFIX = tuple(range(5, 45))  # longer than a step's tokens, and of many pages
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, seed=9, top_p=0.9),
)


def load(
    folder: Path,
    dtype: torch.dtype,
    group: RankGroup | None = None,
    device: torch.device = CPU,
) -> PagedModel:
    """Load a model with few small pages, on the group's device if there is one."""
    device = device if group is None else group.device
    return load_model(
        folder, ModelOptions(page_size=4, num_pages=200), dtype=dtype, device=device, group=group
    )


def say(model: PagedModel) -> dict[str, Any]:
    """Generate three texts without drafts, and again with drafts of which some are wrong."""
    config = EngineConfig(
        page_size=model.page_size,
        num_pages=model.num_pages,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=model.max_model_len,
        num_speculative_tokens=K,
    )
    engine = Engine(model, config, policy=FixedPolicy(K, max_wait_s=0.0))
    plain, _ = _generate(engine, 0, None)
    drafted, cached = _generate(engine, 100, plain)
    engine.check_invariants()
    step = type(model._step).__name__
    return {"plain": plain, "drafted": drafted, "cached": cached, "step": step}


def _generate(
    engine: Engine, first: int, truth: list[TokenIds] | None
) -> tuple[list[TokenIds], int]:
    """Return the texts, and the number of prompt tokens found in the cache."""
    rng = random.Random(0)
    prompts = [(*_PREFIX, 50 + i) for i in range(len(_SAMPLINGS))]
    said: list[TokenIds] = [()] * len(prompts)
    left = dict.fromkeys(range(len(prompts)))
    cached = 0
    for i, sampling in enumerate(_SAMPLINGS):
        stop = StopParams(max_tokens=24, ignore_eos=True)
        engine.submit(Request(first + i, prompts[i], sampling=sampling, stop=stop))
        engine.set_drafting(first + i, DraftOffer("a", K))
    while left:
        for i in left if truth is not None else ():
            assert truth is not None
            future = [t if rng.random() < 0.8 else 3 for t in truth[i][len(said[i]) :][: K // 2]]
            # A wrong sibling before each node makes accepted nodes move.
            tree = DraftTree.validated(
                len(prompts[i]) + len(said[i]),
                [token for t in future for token in (4, t)],
                [2 * depth - 1 for depth in range(len(future)) for _ in range(2)],
                vocab_size=engine.info.vocab_size,
                max_nodes=8,
            )
            engine.post_block(PostedBlock(first + i, tree, "a", 1))
        events = engine.step()
        assert events is not None
        assert not events.failures
        for commit in events.commits:
            said[commit.session_id - first] += tuple(commit.token_ids)
            if commit.finish_reason is not None:
                assert commit.stats is not None
                cached += commit.stats.cached_prompt_tokens
                del left[commit.session_id - first]
    return said, cached


def main(out: str, dtype: str, *folders: str) -> int:
    torch.set_num_threads(1)
    ranks = Ranks.of(os.environ)
    assert ranks is not None
    device = ranks.device("cuda" if torch.cuda.is_available() else "cpu")
    group = RankGroup(ranks, device, start_timeout_s=DEADLINE_S, timeout_s=DEADLINE_S)
    results: dict[str, Any] = {}
    for folder in folders:
        try:
            model = load(Path(folder), getattr(torch, dtype), group)
        except OutriderError as error:
            results[folder] = error.message
            continue
        if not ranks.leads:
            group.follow(model)
        else:
            results[folder] = say(model)
            group.stop()
    if ranks.leads:
        Path(out).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
