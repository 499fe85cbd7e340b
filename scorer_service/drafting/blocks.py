"""Checks the blocks that proposers send. Lives on the event loop; never blocks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection
from typing import Final

from outrider.draft_port import MAX_BLOCKS_AT_ONCE, DraftingEngine, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.errors import InvalidRequestError
from outrider.rpc import codec
from outrider.v1 import draft_pb2
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.drafting.registry import ProposerRegistry
from scorer_service.metrics import ScorerMetrics
from scorer_service.sessions import Session

_MAX_BLOCKS: Final = 2**14  # of a message: all streams wait while one is checked
_log = logging.getLogger(__name__)


class BlockReceiver:
    """Hands good blocks of attached proposers to the engine."""

    def __init__(
        self, engine: DraftingEngine, registry: ProposerRegistry, metrics: ScorerMetrics
    ) -> None:
        self._engine = engine
        self.registry = registry
        self._metrics = metrics
        self._vocab_size = registry.served.vocab_size
        self._max_nodes = registry.limits.max_block_tokens

    def receive(self, proposer: AttachedProposer, blocks: Collection[draft_pb2.Block]) -> None:
        """Post good blocks, and drop and count stale and bad ones.

        Several bad blocks detach the proposer.
        """
        if proposer.detached.done():
            return
        if len(blocks) > _MAX_BLOCKS:
            self.on_bad(proposer, f"{len(blocks)} blocks in a message")
            return
        if len(blocks) > MAX_BLOCKS_AT_ONCE * len(proposer.sessions):
            blocks = _newest(blocks)
        sessions, registry = proposer.sessions, self.registry
        good: list[PostedBlock] = []
        now = time.perf_counter()  # one time for all blocks of a batch
        for block in blocks:
            session = sessions.get(session_id := block.session)
            if session is not None and block.epoch == session.epoch:
                try:
                    good.append(self._checked(proposer, session, block, now))
                except InvalidRequestError as error:
                    self.on_bad(proposer, error.message)
                else:
                    if not session.drafted:
                        registry.on_first_block(proposer, session)
                    continue
            elif session is None and not 0 < session_id <= registry.last_opened:
                self.on_bad(proposer, f"session {session_id} was never opened")
            else:
                self._metrics.stale_blocks.inc()
            if proposer.detached.done():
                break
        if good:
            self._engine.post_blocks(good)

    def on_bad(self, proposer: AttachedProposer, what: str) -> None:
        """Count a malformed message; too many end the stream."""
        self._metrics.malformed_blocks.inc()
        proposer.bad_blocks += 1
        _log.warning("proposer %s sent a bad message: %s", proposer.id, what)
        if proposer.bad_blocks >= self.registry.limits.max_bad_blocks:
            error = InvalidRequestError(
                f"{proposer.bad_blocks} malformed messages; the last: {what}", reason="BAD_BLOCKS"
            )
            self.registry.detach(proposer, error)

    def _checked(
        self, proposer: AttachedProposer, session: Session, block: draft_pb2.Block, now: float
    ) -> PostedBlock:
        """Return the block for the engine. Raises `InvalidRequestError` for a bad one."""
        # Each field of the message is read once, since protobuf is slow at that.
        base_len, method_index, draft_us = block.base_len, block.method_index, block.draft_us
        length, methods, probs = len(session.committed), proposer.methods, block.draft_probs
        if base_len > length:
            raise InvalidRequestError(
                f"base_len {base_len} is beyond what was committed", param="base_len"
            )
        if method_index >= len(methods):
            raise InvalidRequestError(
                f"method_index {method_index} is none of Hello.methods", param="method_index"
            )
        max_nodes = self._max_nodes
        if len(probs) > max_nodes:  # not worth converting
            raise InvalidRequestError("one distribution per token, or none", param="draft_probs")
        tree = DraftTree.validated(
            base_len,
            block.token_ids,
            block.parents,
            self._vocab_size,
            max_nodes,
            [*map(codec.draft_probs_from_proto, probs)] if probs else (),
            block.confidences,
        )
        if session.rounds is not None and base_len == length:
            session.rounds.block(draft_us)
        # The constructor would take three times as long.
        posted = session.id, tree, proposer.id, draft_us, now, methods[method_index]
        return tuple.__new__(PostedBlock, posted)


def _newest(blocks: Collection[draft_pb2.Block]) -> Collection[draft_pb2.Block]:
    """Leave out blocks that the engine would drop unseen: checking them could take seconds."""
    newer: Counter[int] = Counter()
    kept: list[draft_pb2.Block] = []
    for block in reversed(list(blocks)):
        newer[block.session] += 1
        if newer[block.session] <= MAX_BLOCKS_AT_ONCE:
            kept.append(block)
    return kept[::-1]
