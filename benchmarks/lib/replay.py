"""Measure acceptance along texts that are written once for all drafting methods.

The text of a request never depends on its drafts. An engine writes it once, with the target's
hidden states, and proposers then draft along it. The tokens of a round are the drafted ones that
agree with the text, and the next one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.drafting.proposer import FeatureProposer, Proposer, SessionStart
from outrider.engine.engine import Engine
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.engine.model.paged_model import PagedModel
from outrider.features import FeatureOrder, FeatureSpec, FeatureWindow
from outrider.params import SamplingParams, StopParams, TokenIds
from outrider.policy.base import FixedPolicy
from outrider.types import Request

SPARE = 16  # tokens recorded beyond those of interest, so that no round reaches the end


@dataclass(frozen=True)
class Capture:
    """A request's text, and the hidden states that it was sampled from."""

    prompt: TokenIds
    token_ids: TokenIds
    sampling: SamplingParams
    spec: FeatureSpec | None
    rows: Tensor  # bfloat16 [positions, spec.width]

    def states(self, start: int, end: int, spec: FeatureSpec) -> bytes:
        """Return the states of positions `start` to `end` - 1 as they go to a proposer."""
        assert self.spec is not None
        size, kept = self.spec.hidden_size, self.spec.states
        starts = [kept.index(state) * size for state in spec.states]
        rows = self.rows[start:end]
        parts = torch.cat([rows[:, first : first + size] for first in starts], dim=1)
        return parts.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Replay:
    """Counts over the rounds of some recordings."""

    rounds: int
    drafted: int
    reached: tuple[int, ...]  # rounds in which so many draft tokens and more came true, from 1 on
    draft_s: float  # CPU time of this thread for the drafts of a round after the first, mean

    @property
    def length(self) -> float:
        """Return the tokens per round."""
        return 1 + sum(self.reached) / self.rounds

    @property
    def positions(self) -> tuple[float, ...]:
        """Return `reached` as shares of the rounds."""
        return tuple([count / self.rounds for count in self.reached])


def record(
    model: PagedModel, requests: Sequence[tuple[TokenIds, SamplingParams]], num_tokens: int
) -> list[Capture]:
    """Write `num_tokens` and `SPARE` more for each request, in the order of `requests`."""
    pool = model.pools.features
    streams = None if pool is None else HiddenStateStreams(pool)
    config = EngineConfig(
        page_size=model.page_size,
        num_pages=model.num_pages,
        max_model_len=min(model.max_model_len, model.page_size * model.num_pages),
        enable_prefix_caching=False,
    )
    engine = Engine(model, config, policy=FixedPolicy(1, max_wait_s=60.0), features=streams)
    stop = StopParams(max_tokens=num_tokens + SPARE, ignore_eos=True)
    for session, (prompt, sampling) in enumerate(requests):
        engine.submit(Request(session, prompt, sampling, stop))
        order = None if pool is None else FeatureOrder(0, pool.spec, FeatureWindow())
        engine.set_drafting(session, DraftOffer("reader", 1, features=order))
    tokens: list[list[int]] = [[] for _ in requests]
    rows: list[list[Tensor]] = [[] for _ in requests]
    running = set(range(len(requests)))
    while running:
        events = engine.step()
        if events is None:
            continue
        for part in events.features.rows if events.features else ():
            assert streams is not None
            streams.give_back(part.window, len(part.rows))
            sent = torch.frombuffer(bytearray(part.rows), dtype=torch.bfloat16)
            rows[part.session_id].append(sent)
        for commit in events.commits:
            tokens[commit.session_id] += commit.token_ids
            length = commit.base_len + len(commit.token_ids)
            block = PostedBlock(commit.session_id, DraftTree.chain(length, ()), "reader", 0)
            engine.post_block(block)
            if commit.finish_reason is not None:
                running.remove(commit.session_id)
    spec = None if pool is None else pool.spec
    width = 0 if spec is None else spec.width
    states = [torch.cat(r).view(-1, width) if r else torch.empty(0, 0) for r in rows]
    return [
        Capture(prompt, tuple(tokens[i]), sampling, spec, states[i])
        for i, (prompt, sampling) in enumerate(requests)
    ]


def replay(recordings: Sequence[Capture], proposer: Proposer, k: int) -> Replay:
    """Draft `k` tokens in every round that begins before a recording's last `SPARE` tokens."""
    texts = [each.prompt + each.token_ids for each in recordings]
    known = [len(each.prompt) + 1 for each in recordings]
    states = [0] * len(recordings)  # sent of each

    def send(session: int) -> None:
        spec = proposer.traits.features
        if spec is not None:
            start, states[session] = states[session], known[session] - 1
            sent = recordings[session].states(start, known[session] - 1, spec)
            cast(FeatureProposer, proposer).features(session, start, sent)

    for session, one in enumerate(recordings):
        proposer.open(session, SessionStart(one.prompt, one.sampling, k, len(texts[session])))
        send(session)
        proposer.commit(session, len(one.prompt), one.token_ids[:1], k)
    running = set(range(len(recordings)))
    rounds = drafted = 0
    reached, seconds = [0] * k, []
    while running:
        began = time.thread_time()
        drafts = _drafts(proposer, sorted(running))
        seconds.append(time.thread_time() - began)
        for session, tree in drafts.items():
            rounds += 1
            drafted += len(tree.token_ids)
            accepted = _agreeing(tree, texts[session][known[session] :])
            for depth in range(accepted):
                reached[depth] += 1
            base_len = known[session]
            known[session] += accepted + 1
            send(session)
            new = texts[session][base_len : known[session]]
            proposer.commit(session, base_len, new, k)
            if known[session] >= len(texts[session]) - SPARE:
                running.remove(session)
                proposer.close(session)
    draft_s = sum(seconds[1:]) / max(1, len(seconds) - 1)
    return Replay(rounds, drafted, tuple([count for count in reached if count]), draft_s)


def _drafts(proposer: Proposer, sessions: Sequence[int]) -> Mapping[int, DraftTree]:
    found: dict[int, DraftTree] = {}
    waiting: Sequence[int] = sessions
    while waiting:
        round_ = proposer.draft(waiting)
        assert not round_.lost
        found.update(round_.drafts)
        waiting = [session for session in waiting if session not in found]
    return found


def _agreeing(tree: DraftTree, text: Sequence[int]) -> int:
    """Return the number of nodes on the path along `text`."""
    node = -1
    for depth in range(len(text)):
        child = tree.descend(text[depth : depth + 1], node)
        if child is None:
            return depth
        node = child
    return len(text)


def lengths(
    texts: Sequence[Capture], proposer: Proposer, k: int, categories: Sequence[str]
) -> dict[str, float]:
    """Return the tokens per round by category of prompt; texts without one are left out."""
    found: dict[str, list[Capture]] = {}
    for text, category in zip(texts, categories, strict=True):
        if category:
            found.setdefault(category, []).append(text)
    return {name: replay(some, proposer, k).length for name, some in found.items()}
