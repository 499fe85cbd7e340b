"""The contract between an engine and the side of a scorer that drafts for it.

`DraftingEngine` is an engine as other threads see it. `ColocatedEngine` is an engine as a proposer
on its own thread sees it. This module imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from outrider.draft_tree import DraftTree
from outrider.errors import InternalError
from outrider.features import FeatureOrder, FeatureRows, FeatureSpec, FeatureWindow
from outrider.params import TokenIds

if TYPE_CHECKING:
    from torch import Tensor

MAX_BLOCKS_AT_ONCE: Final = 4
"""Blocks of one session that an engine keeps between two steps: the newest."""


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """The proposer of a session, and what it can do for the session."""

    proposer_id: str | None
    """None: nobody drafts for the session, and its row never waits."""
    max_draft_tokens: int
    runs_ahead: bool = False
    """The proposer can draft the next round before this one is verified."""
    own_device: bool = False
    """The proposer computes on another device than the engine: neither slows the other down."""
    colocated: bool = False
    """The proposer is the engine's `ColocatedProposer`."""
    requested: bool = True
    """The first draft was requested already; otherwise the next commit requests it."""
    features: FeatureOrder | None = None
    """Hidden states that the proposer is to be sent, from the first position on."""
    reported_to: bool = field(init=False)
    """The proposer hears of every round by the step's events."""
    hears_early: bool = field(init=False)
    """The proposer can draft on tokens alone, before the step is counted."""

    def __post_init__(self) -> None:
        reported_to = self.proposer_id is not None and not self.colocated
        object.__setattr__(self, "reported_to", reported_to)
        object.__setattr__(self, "hears_early", reported_to and self.features is None)


NO_DRAFTS: Final = DraftOffer(None, 0)


class PostedBlock(NamedTuple):  # made in a third of a frozen dataclass's time
    """A validated draft for one session."""

    session_id: int
    tree: DraftTree
    proposer_id: str
    draft_us: int  # that the proposer spent on it
    arrived_at: float | None = None
    """Arrival on `time.perf_counter`'s clock; None: now. The block then waits for a step to end,
    which is no delay of the proposer."""
    method: str = ""


class HiddenStateControl(Protocol):
    """Flow control and projections of an engine's hidden states. Thread-safe; never blocks."""

    def give_back(self, window: FeatureWindow, size: int) -> None:
        """Return `size` bytes to a window, since they were read or are of no use any more."""

    def put_projection(self, spec: FeatureSpec, matrix: bytearray) -> Future[None]:
        """Keep a projection on the device; the future ends when it is there."""

    def drop_projection(self, sha256: bytes) -> None:
        """Forget a projection that no proposer uses."""


class NoHiddenStates:
    """Implements `HiddenStateControl` of an engine that hands none out."""

    def give_back(self, window: FeatureWindow, size: int) -> None: ...

    def put_projection(self, spec: FeatureSpec, matrix: bytearray) -> Future[None]:  # noqa: ARG002
        raise InternalError("no proposer that needs hidden states was let in")

    def drop_projection(self, sha256: bytes) -> None: ...


class DraftingEngine(Protocol):
    """An engine as the registry of proposers sees it. Thread-safe; never waits for a step.

    Committed tokens reach the drafting side as `StepEvents`, once per step.
    """

    @property
    def drafting(self) -> bool:
        """Tell whether drafts are of use at present, with as many requests as there are now."""

    @property
    def features(self) -> HiddenStateControl: ...

    def set_drafting(self, session_id: int, offer: DraftOffer) -> None:
        """Replace the proposer of a session. Unknown sessions are ignored."""

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None:
        """Hand over drafts that arrived together; a step that waits for them takes all of them."""

    def between_same_steps(self) -> AbstractContextManager[object]:
        """Carry out all calls within this context between the same two steps."""


class ColocatingEngine(DraftingEngine, Protocol):
    """An engine that can run a proposer on its own thread."""

    def run_between_steps(
        self, work: Callable[[ColocatedEngine], None], session_id: int | None = None
    ) -> None:
        """Run `work` on the engine's thread, in order with all other calls.

        With a `session_id`, `work` is dropped if that session has ended.
        """


GrownText = tuple[int, Sequence[int], int, bool]
"""A session that a step committed tokens to, and that asks for a draft or has ended.

Its committed tokens are the engine's own list, which grows. Then come how many draft tokens the
next round asks for, and whether it has ended.
"""


class NewTokens(NamedTuple):
    """Tokens that a step committed to a session that goes on."""

    session_id: int
    base_len: int  # committed tokens before them
    token_ids: Sequence[int]


class EarlyTokens(NamedTuple):
    """Tokens of a step that proposers hear of before the next step is launched.

    A launch takes the host a millisecond or more, in which they can draft already. `StepEvents`
    have the same tokens later, with the rest.
    """

    rows: tuple[NewTokens, ...]
    step_s: float  # that the step took


class DeviceNodes(NamedTuple):
    """Drafts on the device, of which the first nodes are a draft, too.

    Trees have the same number of nodes each. Where a draft has fewer, the others are copies of its
    first one, which no walk reaches.
    """

    tokens: Tensor  # int32 [rows, nodes]
    parents: Tensor | None = None  # int32 [rows, nodes], as in a `DraftTree`; None: chains
    max_depth: int | None = None  # nodes of a path, if it may not have all


class DeviceDrafts(NamedTuple):
    """Drafts that the device has when a step begins, and the host only later."""

    nodes: DeviceNodes
    places: Mapping[int, int]  # row of `nodes` by session
    lengths: Mapping[int, int]  # draft tokens by session


VerifyingRow = tuple[int, int, int, int, int, bool]
"""A row of the step in flight whose next draft may be launched behind the step.

Its session and committed tokens; the row of `VerifyOutput.tokens`; draft tokens that may be
accepted; those that the next round asks for; whether the draft is a tree.
"""


class VerifyOutput(NamedTuple):
    """The place on the device where the result of the step in flight will be."""

    rows: Sequence[VerifyingRow]
    tokens: Tensor
    """int [at least rows, 1 + width]: drafts accepted, then the target's choices."""


class StepStates(NamedTuple):
    """Hidden states that a step writes, in columns: some rows of each session."""

    sessions: Sequence[int]
    epochs: Sequence[int]  # of the sessions' orders
    starts: Sequence[int]  # position of each session's first row
    counts: Sequence[int]  # rows of each
    places: Sequence[int]  # of each session's first row in `rows`
    rows: Tensor  # bfloat16 [any, width]


class ThreadHiddenStates(Protocol):
    """Hidden states of the engine, used on its thread."""

    def take_colocated(self) -> list[FeatureRows]:
        """Return the rows of proposers on this thread that came; others are sent as usual."""
        ...

    def on_device(self, spec: FeatureSpec) -> StepStates | None:
        """Return what the step in flight writes, as far as it is at hand on the device.

        Of each session those rows come first that are accepted.
        """
        ...

    def were_read(self, states: StepStates, numbers: Sequence[int]) -> None:
        """Count these `on_device` states as sent.

        Those of a session that asks for no draft when the step ends stay due.
        """

    def give_back(self, window: FeatureWindow, size: int) -> None:
        """Return `size` bytes to a window."""

    def put_projection(self, spec: FeatureSpec, matrix: bytearray) -> None:
        """Keep a projection on the device."""


class ColocatedEngine(Protocol):
    """An engine as its `ColocatedProposer` sees it, on the engine's thread."""

    @property
    def features(self) -> ThreadHiddenStates | None: ...

    @property
    def grown_texts(self) -> Sequence[GrownText]:
        """Return texts that grew with the step that ended last; see `GrownText`."""

    def asks(self, session_id: int) -> bool:
        """Tell whether a session's next round is to have a draft; False if it is unknown."""
        ...

    @property
    def verify_output(self) -> VerifyOutput | None:
        """Return where the step in flight leaves its result; None if only the host has it."""

    def committed(self, session_id: int) -> TokenIds | None:
        """Return the prompt and output of a session; None if it is unknown."""

    def post_block(self, block: PostedBlock) -> object:
        """Take a draft."""

    def schedule_with_device_drafts(self, drafts: DeviceDrafts) -> bool:
        """Let the next step verify drafts that the host will have only after its launch.

        False if the step cannot: then the drafts must be posted before it.
        """

    def count_drafting(self, seconds: float) -> None:
        """Count time that the thread spent on drafts: of the step in flight, or of the next."""


class ColocatedProposer(Protocol):
    """A proposer that drafts on the engine's thread, between its steps."""

    @property
    def busy(self) -> bool:
        """Tell whether drafts are wanted though no step has ended."""

    @property
    def launched_drafts(self) -> DeviceDrafts | None:
        """Return where drafts behind the step in flight will be, by session; None without such.

        A step that begins with them is launched without a word of the host.
        """

    def draft_between_steps(self, engine: ColocatedEngine) -> None:
        """Draft for the step to come."""

    def after_launch(self, engine: ColocatedEngine) -> None:
        """Do what no step waits for, and post the drafts that the step was launched without."""
