"""Several methods in one proposer: the first that has a guess drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from outrider.draft_tree import DraftTree
from outrider.drafting.proposer import (
    NO_PACE,
    DraftRound,
    FeatureProposer,
    Follower,
    Pace,
    Proposer,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.drafting.sessions import SessionMethod
from outrider.errors import ConfigError

_MAX_REOPENS = 3  # of a session that one method keeps losing


@dataclass(slots=True)
class _Session:
    key: SessionKey
    follower: Follower
    start: SessionStart  # without the prefix: the follower has it
    prompt_len: int
    order: list[int]  # of methods, the preferred one first
    open: set[int] = field(default_factory=set)  # methods that know the session
    losses: int = 0
    trees: dict[int, DraftTree] = field(default_factory=dict)
    """By method, the rest of its last draft, whether or not the scorer kept it."""
    drafted_by: int | None = None  # the method whose draft the scorer holds


class HybridProposer(SessionMethod[_Session]):
    """Asks its methods one after the other; all of them follow the commits.

    A session's order is that of `SessionStart.methods`, else that of `children`; "deterministic"
    only takes part where there is advice. A session that a method loses is opened on it again, a
    few times. The session is lost when no method is left. Raises `ConfigError`.
    """

    def __init__(self, children: Sequence[Proposer]) -> None:
        traits = [child.traits for child in children]
        names = tuple(each.method for each in traits)
        if len(set(names)) != len(names) or len(names) < 2:
            raise ConfigError("--method names several different methods, or one.")
        readers = [i for i, each in enumerate(traits) if each.features is not None]
        if len(readers) > 1:
            raise ConfigError(
                "--method names several methods that read hidden states of the target "
                f"({', '.join(names[i] for i in readers)}); one proposer can have one of them."
            )
        self._reader = readers[0] if readers else None  # the method that is given features
        self._children = tuple(children)
        self._names = names
        super().__init__(
            ProposerTraits(
                method=names[0],
                model=" ".join(each.model for each in traits if each.model),
                vocab_size=max(each.vocab_size for each in traits),
                max_sessions=min(each.max_sessions for each in traits),
                max_draft_tokens=max(each.max_draft_tokens for each in traits),
                max_model_len=max(each.max_model_len for each in traits),
                runs_ahead=any(each.runs_ahead for each in traits),
                methods=names,
                features=traits[readers[0]].features if readers else None,
            )
        )

    @property
    def projection(self) -> bytes:
        assert self._reader is not None
        return cast("FeatureProposer", self._children[self._reader]).projection

    def features(self, session: SessionKey, start: int, rows: bytes | memoryview) -> None:
        known = self._sessions.get(session)
        if self._reader is not None and known is not None and self._reader in known.open:
            child = cast("FeatureProposer", self._children[self._reader])
            child.features(session, start, rows)

    def commit(
        self, session: SessionKey, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> None:
        super().commit(session, base_len, tokens, num_draft_tokens)
        known = self._sessions.get(session)
        if known is not None:
            for i in known.open:
                self._children[i].commit(session, base_len, tokens, num_draft_tokens)

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        done = DraftRound()
        forward_s = 0.0
        asking = {known.key: known for known in self._asked(sessions)}
        unfinished: set[SessionKey] = set()
        for rank in range(len(self._children)):
            for i, child in enumerate(self._children):
                keys = [  # without sessions that are lost by now, which nobody would close
                    key
                    for key, known in asking.items()
                    if known.order[rank : rank + 1] == [i]
                    and key in self._sessions
                    and self._ensure_open(i, known)
                ]
                if keys or rank == 0:  # a child that is not asked still reports lost sessions
                    round_ = child.draft(keys, pace)
                    forward_s += round_.forward_s
                    unfinished.update(round_.unfinished)
                    self._take(i, round_, asking, done)
        for key, known in asking.items():
            if key in self._sessions:
                if key in unfinished:
                    done.unfinished.append(key)
                else:
                    known.drafted_by = None
                    done.drafts.append((key, DraftTree.chain(known.follower.length, ())))
        # A method that was asked later may have lost a session that has a draft by now.
        done.drafts[:] = [draft for draft in done.drafts if draft[0] in self._sessions]
        done.at_hand[:] = [key for key in done.at_hand if key in self._sessions]
        done.lost.extend(self._take_lost())
        return replace(done, forward_s=forward_s)

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:
        done = DraftRound()
        for i, child in enumerate(self._children):
            keys = [
                key
                for key in sessions
                if key in self._sessions and self._sessions[key].drafted_by == i
            ]
            self._take_trees(i, child.ahead(keys if child.traits.runs_ahead else (), pace), done)
        return done

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> _Session:
        order = [
            self._names.index(name)
            for name in dict.fromkeys(start.methods or self._names)
            if name in self._names and (name != "deterministic" or start.advice.token_ids)
        ]
        known = _Session(key, follower, replace(start, prefix=()), start.prompt_len, order)
        for i in order:
            self._open_on(i, known)
        return known

    def _follow(self, state: _Session, fresh: Sequence[int]) -> None:
        walked = {i: tree.walk(fresh) for i, tree in state.trees.items()}
        state.trees = {i: tree for i, tree in walked.items() if tree is not None and tree.token_ids}
        if state.drafted_by not in state.trees:
            state.drafted_by = None

    def _end(self, state: _Session) -> None:
        for i in state.open:
            self._children[i].close(state.key)
        state.open.clear()

    def _release(self, state: _Session) -> None:
        for i in state.open:
            self._children[i].forget(state.key)

    def _take(
        self, i: int, round_: DraftRound, asking: dict[SessionKey, _Session], done: DraftRound
    ) -> None:
        """Take method `i`'s answers; `asking` keeps the sessions without a draft."""
        for key in round_.lost:
            self._child_lost(i, key)
        for key, tree in round_.drafts:
            if tree.token_ids:
                del asking[key]
                self._drafted(i, key, tree, done)
                done.drafts.append((key, tree))
        for key in round_.at_hand:
            known = asking.pop(key)
            if known.drafted_by == i:
                done.at_hand.append(key)
            else:  # the scorer took another method's draft since
                self._drafted(i, key, known.trees[i], done)
                done.drafts.append((key, known.trees[i]))
        self._take_trees(i, round_, done)

    def _take_trees(self, i: int, round_: DraftRound, done: DraftRound) -> None:
        done.loops.extend(round_.loops)
        for key, tree in round_.trees:
            self._drafted(i, key, tree, done)
            done.trees.append((key, tree))

    def _drafted(self, i: int, key: SessionKey, tree: DraftTree, done: DraftRound) -> None:
        known = self._sessions[key]
        known.trees[i] = tree
        known.drafted_by = i
        done.methods[key] = i

    def _open_on(self, i: int, known: _Session) -> None:
        follower = known.follower
        now = replace(
            known.start,
            prefix=tuple(follower.tokens),
            num_draft_tokens=follower.num_draft_tokens,
            max_len=follower.max_len,
            num_output_tokens=max(0, len(follower.tokens) - known.prompt_len),
        )
        self._children[i].open(known.key, now)
        known.open.add(i)

    def _ensure_open(self, i: int, known: _Session) -> bool:
        if i not in known.open and known.losses <= _MAX_REOPENS:
            self._open_on(i, known)
        return i in known.open

    def _child_lost(self, i: int, key: SessionKey) -> None:
        known = self._sessions.get(key)
        if known is None:
            return
        known.open.discard(i)
        known.trees.pop(i, None)
        if i == self._reader:  # it needs all features again: they come with a new Open
            self._lose(key)
            return
        known.losses += 1
        if not known.open and known.losses > _MAX_REOPENS:
            self._lose(key)
