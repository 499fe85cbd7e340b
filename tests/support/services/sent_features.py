"""All rows of hidden states that an engine sends while it writes texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.hidden_states.streams import MAX_AHEAD_BYTES, HiddenStateStreams
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import StepRunner
from outrider.features import FeatureOrder, FeatureSpec, FeatureWindow
from outrider.params import SamplingParams, StopParams
from outrider.policy.base import FixedPolicy
from outrider.types import Request

K = 3


def write(
    model: PagedModel,
    runner: StepRunner,
    prompts: Sequence[Sequence[int]],
    spec: FeatureSpec,
    matrix: Tensor | None = None,
    max_tokens: int = 12,
) -> tuple[list[list[int]], list[Tensor]]:
    """Texts with their prompts, and of each the rows that came, float32 [n, spec.width].

    Drafts are right, wrong in the end, and wrong, in turn.
    """
    assert model.pools.features is not None
    ahead = 0 if model.device.type == "cpu" else MAX_AHEAD_BYTES
    streams = HiddenStateStreams(model.pools.features, max_ahead_bytes=ahead)
    if matrix is not None:
        streams.put_projection(spec, bytearray(matrix.view(torch.uint8).numpy()))
    config = EngineConfig(
        page_size=model.page_size,
        num_pages=model.num_pages,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=model.max_model_len,
        num_speculative_tokens=K,
    )
    policy = FixedPolicy(K, max_wait_s=0.0)
    engine = Engine(model, config, policy=policy, runner=runner, features=streams)
    order = FeatureOrder(1, spec, FeatureWindow())
    count = len(prompts)
    texts = [list(prompt) for prompt in (*prompts, *prompts)]
    rows: list[list[Tensor]] = [[] for _ in texts]
    for speculate in (False, True):  # the second time prompts are cached, and there is a truth
        left = set(range(count, 2 * count) if speculate else range(count))
        truth = texts[:count]
        for i in left:
            stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
            sampling = SamplingParams(temperature=0.0)
            engine.submit(Request(i, tuple(prompts[i % count]), sampling=sampling, stop=stop))
            if speculate:
                engine.set_drafting(i, DraftOffer("p", K, features=order))
        while left:
            for i in left if speculate else ():
                base = len(texts[i])
                draft = truth[i - count][base : base + K]
                if base % 3 and draft:
                    draft[-1] ^= 1
                if base % 3 == 2:
                    draft[0] ^= 1
                engine.post_block(PostedBlock(i, DraftTree.chain(base, draft), "p", 1))
            events = engine.step()
            assert events is not None
            assert not events.failures
            for commit in events.commits:
                texts[commit.session_id] += commit.token_ids
                if commit.finish_reason is not None:
                    left.discard(commit.session_id)
            for part in () if events.features is None else events.features.rows:
                part.window.on_the_way -= len(part.rows)
                flat = torch.frombuffer(bytearray(part.rows), dtype=torch.bfloat16)
                assert part.start == sum(map(len, rows[part.session_id])), "in order"
                rows[part.session_id].append(flat.view(-1, spec.width).float())
    assert texts[:count] == texts[count:]
    return texts[count:], [torch.cat(parts) for parts in rows[count:]]
