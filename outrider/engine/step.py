"""The input of one forward, and its result. Frozen."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_port import DeviceDrafts, DeviceNodes
from outrider.draft_tree import DraftProbs, DraftTree, chain_parents, depths
from outrider.drafted_nodes import DraftNodes
from outrider.engine.batch import RowSlice
from outrider.engine.sequence import Sequence
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.params import TokenIds
from outrider.rounds import Round, chain_round
from outrider.types import TokenLogprobs


class ChosenDraft(NamedTuple):
    """Tokens to verify after the last known one."""

    token_ids: TokenIds
    parents: tuple[int, ...] = ()  # as in a `DraftTree`; empty: a chain
    probs: tuple[DraftProbs | None, ...] = ()  # that they were drawn from; empty: point masses
    confidences: bytes = b""  # as in a `DraftTree`, if they may choose what is verified

    @property
    def nodes(self) -> DraftNodes:
        return DraftNodes(self.confidences, self.parents)

    def kept(self, chosen: Rows[bool]) -> ChosenDraft:
        """Return the draft of the `chosen` nodes, none of which lacks its parent."""
        count = sum(chosen)
        if count == len(self.token_ids):
            return self
        if not self.parents:
            probs, told = self.probs[:count], self.confidences[:count]
            return ChosenDraft(self.token_ids[:count], (), probs, told)
        places = [*accumulate(chosen, initial=-1)]  # in the new draft, of the root and the nodes
        parents = tuple([places[parent + 1] for parent in compress(self.parents, chosen)])
        told = bytes(compress(self.confidences, chosen))
        chain = parents == chain_parents(count)
        return ChosenDraft(
            tuple(compress(self.token_ids, chosen)), () if chain else parents, (), told
        )


NO_DRAFT = ChosenDraft(())


class ScheduledRow(NamedTuple):  # made in a third of a frozen dataclass's time
    """A row's share of a step: known tokens that lack KV, then drafts to verify.

    With `slice.parents` the drafts are the nodes of a tree, else a chain.
    """

    seq: Sequence
    slice: RowSlice
    draft: TokenIds
    draft_probs: tuple[DraftProbs | None, ...] = ()  # empty: point masses
    num_prompt_logits: int = 0
    """Tokens before those with `slice.num_logits` whose logits tell the prompt's next tokens."""

    @property
    def plain_len(self) -> int:
        """Return the text's length, if the logits are for one token after others of the output.

        Of other rows it is greater than any length.
        """
        length = self.slice.start + len(self.slice.token_ids)
        decodes = self.slice.num_logits == 1 and length > self.seq.num_prompt_tokens
        return length if decodes and not self.draft else sys.maxsize

    @property
    def scored_tokens(self) -> TokenIds:
        """Return the prompt's tokens that these logits tell."""
        first = self.slice.start + 1
        return tuple(self.seq.token_ids[first : first + self.num_prompt_logits])

    @property
    def forward_slice(self) -> RowSlice:
        """Return the slice with the logits of the prompt, too."""
        if not self.num_prompt_logits:
            return self.slice
        return self.slice._replace(num_logits=self.slice.num_logits + self.num_prompt_logits)

    @property
    def posted(self) -> ScheduledRow | None:
        """Return the row with the draft that it held places for; None if nobody posted that."""
        draft = self.seq.draft
        if draft is None or draft.base_len != len(self.seq.token_ids):
            return None
        verified, part = draft.at_most(len(self.draft)), self.slice
        if not verified.is_chain:
            part = part._replace(parents=verified.parents)
        return ScheduledRow(self.seq, part, verified.token_ids)

    def round(self, output: TokenIds) -> Round:
        """Return the round in which verification gave `output`, whose last token is not a draft."""
        drafted, accepted, parents = len(self.draft), len(output) - 1, self.slice.parents
        if not parents:
            return chain_round(drafted, accepted)
        tree = DraftTree(0, self.draft, tuple(parents))
        node = tree.descend(output[:-1])
        if node is None:  # a device orders nodes otherwise than the host if scores are NaN
            return chain_round(drafted, accepted)
        return Round(drafted, max(depths(parents)) + 1, accepted, not tree.is_leaf(node), node)


class DrawnTokens(NamedTuple):
    """Tokens that the step in flight draws: the last known ones of rows of the step behind it."""

    verified: Tensor  # on the device: `Verified.tokens` of the step in flight
    sources: Rows[int]  # per row of the step behind: its row of `verified`, or -1 for none

    def fill_in(self, input_ids: Tensor, last: Rows[int] | NDArray[np.int32]) -> None:
        """Enqueue their copy to `input_ids` int64 [num_tokens].

        `last` are the places of the rows' last known tokens.
        """
        pairs = np.stack((last, self.sources))
        places, rows = torch.from_numpy(pairs[:, pairs[1] >= 0]).to(
            input_ids.device, non_blocking=True
        )
        drawn = self.verified[:, 1].index_select(0, rows)
        input_ids.index_copy_(0, places, drawn.to(input_ids.dtype))


class FilledIn(NamedTuple):
    """Where numbers of drafts on the device are copied to."""

    numbers: Tensor  # [drafts, nodes]: tokens or parents
    firsts: Rows[int]  # the place of each row's first
    to: Tensor  # [n]


class RowSlots(NamedTuple):
    """Slots of some rows' tokens, on the device."""

    slots: Tensor  # int64 [any]: of each row one after the other
    firsts: Rows[int]  # the place of each row's first


def fill_in_drafts(late: DeviceDrafts, rows: Rows[ScheduledRow], *parts: FilledIn) -> None:
    """Enqueue the copy of drafts on the device. What is there of rows without such stays."""
    steps = np.arange(late.nodes.tokens.shape[1])
    sources = np.array([late.places.get(row.seq.session_id, -1) for row in rows])
    lengths = np.array([len(row.draft) for row in rows]) * (sources >= 0)
    real = steps < lengths[:, None]  # [rows, tokens of a draft]
    firsts = [sources * len(steps), *[part.firsts for part in parts]]
    places = [(np.array(first)[:, None] + steps)[real] for first in firsts]
    device = late.nodes.tokens.device
    source, *targets = torch.from_numpy(np.stack(places)).to(device, non_blocking=True)
    for part, target in zip(parts, targets, strict=True):
        found = part.numbers.flatten().index_select(0, source)
        part.to.index_copy_(0, target, found.to(part.to.dtype))


TO_BE_DRAWN: Final = 0
"""A placeholder for a token of the step in flight."""


class SingleRows:
    """Rows of one token each, a text's last, without drafts: in columns, since most rows are."""

    __slots__ = ("_rows", "seqs", "starts", "tables", "tokens")

    def __init__(self, seqs: list[Sequence]) -> None:
        self.seqs = seqs
        texts = [seq.token_ids for seq in seqs]
        self.starts = [len(text) - 1 for text in texts]
        self.tokens = [text[-1] for text in texts]
        self.tables = [seq.block_table for seq in seqs]
        self._rows: tuple[ScheduledRow, ...] | None = None

    def following(self) -> SingleRows:
        """Return the same rows with the tokens that they draw, which are placeholders yet."""
        rows = SingleRows.__new__(SingleRows)
        rows.seqs, rows.tables, rows._rows = self.seqs, self.tables, None
        rows.starts = [start + 1 for start in self.starts]
        rows.tokens = [TO_BE_DRAWN] * len(self.seqs)
        return rows

    def __len__(self) -> int:
        return len(self.seqs)

    def row(self, i: int) -> ScheduledRow:
        """Return one row as an object."""
        part = RowSlice((self.tokens[i],), self.starts[i], self.tables[i], 1)
        return ScheduledRow(self.seqs[i], part, ())

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        """Return all of them as objects, for work that is not done in columns."""
        if self._rows is None:
            self._rows = tuple(map(self.row, range(len(self.seqs))))
        return self._rows


@dataclass(frozen=True, slots=True)
class Step:
    """The frozen input of one forward: `singles`, then `others`."""

    others: tuple[ScheduledRow, ...]
    num_tokens: int
    device_drafts: DeviceDrafts | None = None
    """Drafts for which rows have placeholders."""
    drawn: DrawnTokens | None = None
    """Tokens for which rows have placeholders; not with device drafts."""
    singles: SingleRows = field(default_factory=lambda: SingleRows([]))

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        return self.singles.rows + self.others

    def row(self, i: int) -> ScheduledRow:
        """Return one of `rows`."""
        behind = i - len(self.singles)
        return self.singles.row(i) if behind < 0 else self.others[behind]

    @property
    def num_rows(self) -> int:
        return len(self.singles.seqs) + len(self.others)

    @property
    def seqs(self) -> list[Sequence]:
        return self.singles.seqs + [row.seq for row in self.others]

    @property
    def plain_lens(self) -> list[int]:
        """Return `plain_len` of the rows."""
        singles = [start + 1 for start in self.singles.starts]
        return singles + [sys.maxsize if row.draft else row.plain_len for row in self.others]

    @property
    def has_drafts(self) -> bool:
        """Tell whether some row has a draft to verify."""
        return any(row.draft for row in self.others)

    @property
    def all_drafted(self) -> bool:
        """Tell whether each row has a draft to verify."""
        return not self.singles.seqs and all(row.draft for row in self.others)

    @property
    def has_prompts(self) -> bool:
        """Tell whether some tokens get no logits, so that the step is not captured."""
        logits = sum([row.slice.num_logits for row in self.others])
        return len(self.singles.seqs) + logits < self.num_tokens

    def fill_in(self, input_ids: Tensor) -> None:
        """Enqueue the copy of what replaces placeholders to `input_ids` int64 [num_tokens].

        There one row follows another.
        """
        if self.drawn is None and self.device_drafts is None:
            return
        ends = [*accumulate([len(row.slice.token_ids) for row in self.rows])]
        if self.drawn is not None:
            self.drawn.fill_in(input_ids, [end - 1 for end in ends])
        if self.device_drafts is not None:
            firsts = [end - len(row.draft) for end, row in zip(ends, self.rows, strict=True)]
            tokens = FilledIn(self.device_drafts.nodes.tokens, firsts, input_ids)
            fill_in_drafts(self.device_drafts, self.rows, tokens)

    @property
    def device_trees(self) -> DeviceNodes | None:
        """Return the trees among the device's drafts; None if there are none, or chains."""
        if self.device_drafts is None or self.device_drafts.nodes.parents is None:
            return None
        return self.device_drafts.nodes

    def with_trees_read(self) -> Step:
        """Return the step with its trees on the host, for which this waits if they are not."""
        drafts, nodes = self.device_drafts, self.device_trees
        if drafts is None or nodes is None or nodes.parents is None:
            return self
        trees = torch.stack((nodes.tokens, nodes.parents), dim=1).tolist()
        others: list[ScheduledRow] = []
        for row in self.others:
            size = len(row.draft)
            if size and row.seq.session_id in drafts.places:
                tree = trees[drafts.places[row.seq.session_id]]
                draft, parents = (tuple(each[:size]) for each in tree)
                token_ids = (*row.slice.token_ids[:-size], *draft)
                part = row.slice._replace(token_ids=token_ids, parents=parents)
                row = row._replace(slice=part, draft=draft)
            others.append(row)
        return replace(self, others=tuple(others), device_drafts=None)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The target's choices per row of the step (none within a prompt), and accepted drafts.

    The first `accepted` + 1 choices of a row count; those after them may be anything.
    """

    choices: Rows[Rows[int]]
    accepted: Rows[int]
    forward_s: float  # packing and the model; of a captured step the whole graph
    verify_s: float = 0.0  # what follows: sampling and verification, or only the copy to the host
    logprobs: Rows[tuple[TokenLogprobs, ...]] = ()
    """Per row of the step, those of its first choices if it asks; empty if no row does."""
    prompt_logprobs: Rows[Rows[Rows[float]]] = ()
    """Per row of the step, `drawn_logprobs` of its `num_prompt_logits`; empty if no row has any."""


def choose_draft(seq: Sequence, max_nodes: int) -> ChosenDraft:
    """Choose at most `max_nodes` tokens of the draft at hand for verification.

    A tree from a proposer that drafts on demand stays a tree. Of one from a proposer that runs
    ahead the side branches are for later rounds. Constraints, penalties and rules that look at the
    draft need one text, which is the preferred path. Such rules leave out confidences, since what
    they verify must not depend on the draft's own tokens.
    """
    draft, node = seq.draft, seq.draft_node
    if draft is None:
        return NO_DRAFT
    # The last token that a request can commit needs no draft, and no KV.
    max_depth = seq.max_len - len(seq.token_ids) - 1
    if max_nodes <= 0 or max_depth <= 0:
        return NO_DRAFT
    max_len = max_nodes if max_nodes < max_depth else max_depth
    if draft.is_chain:
        path = draft.token_ids[node + 1 : node + 1 + max_len]
        if seq.constraint is None and not (draft.probs or draft.confidences):
            return ChosenDraft(path)
    else:
        one_path = seq.drafting.proposer.runs_ahead or seq.edits_logits
        if seq.coupled and not one_path:
            tree = draft.below(node, min(max_nodes, MAX_TREE_NODES), max_depth)
            if not tree.is_chain:
                return ChosenDraft(tree.token_ids, tree.parents, (), tree.confidences)
        path = draft.first_path(max_len, node)
    if seq.constraint is not None:
        # A token that was drawn is rejected, not left out: the next one depends on it.
        drawn = bool(draft.probs)
        path = path[: seq.constraint.num_allowed(path) + drawn]
    probs = draft.first_probs(len(path), node) if draft.probs else ()
    told = b""
    if seq.coupled and draft.confidences:
        told = draft.first_confidences(len(path), node)
    return ChosenDraft(path, (), probs, told)
