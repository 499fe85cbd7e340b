"""What a hidden-state method needs of the target's forward. No torch: it crosses the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outrider.aux_layers import default_layers, trained_layers
from outrider.errors import ConfigError

BYTES_PER_VALUE: Final = 2
"""Features travel as bfloat16, little-endian."""

MAX_ON_THE_WAY: Final = 8 * 2**20
"""Bytes of rows that one proposer has not read yet: of rounds, and as many of prompts. With all
else that may wait for it those of rounds fit into one message of gRPC."""


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """One feature row: the named states of one position, one after the other.

    Row p comes from the forward of the tokens up to and including p: the target draws the token at
    p + 1 from it. `layers` follow the convention of Hugging Face's `hidden_states`: i is the
    residual stream that enters decoder layer i (0-based, no norm), and the number of layers is what
    leaves the last one.
    """

    hidden_size: int  # of the target
    layers: tuple[int, ...] = ()
    final_norm: bool = False  # after them: the final norm's output, which the target's head reads
    projection_dim: int = 0  # 0: rows are sent as they are
    projection_sha256: bytes = b""  # of the bfloat16 matrix [projection_dim, captured_width]

    @property
    def captured_width(self) -> int:
        """Values of a row before the projection."""
        return self.hidden_size * (len(self.layers) + self.final_norm)

    @property
    def width(self) -> int:
        """Values of a row as it is sent."""
        return self.projection_dim or self.captured_width

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is sent."""
        return self.width * BYTES_PER_VALUE

    @property
    def projection_bytes(self) -> int:
        """Bytes of the projection's matrix."""
        return self.projection_dim * self.captured_width * BYTES_PER_VALUE

    @property
    def states(self) -> tuple[str, ...]:
        """What a row holds, in order, as `--hidden-features` names it."""
        return (*map(str, self.layers), *(("final",) if self.final_norm else ()))


class FeatureWindow:
    """How many bytes are on their way to one proposer, of rounds or of prompts.

    Only the engine's thread changes it.
    """

    __slots__ = ("on_the_way", "short")

    def __init__(self) -> None:
        self.on_the_way = 0
        self.short = False
        """Rows wait for room."""

    def room(self, row_bytes: int) -> int:
        """Rows that may follow; a single one always may, if nothing else is on its way."""
        rows = (MAX_ON_THE_WAY - self.on_the_way) // row_bytes
        return max(rows, 0 if self.on_the_way else 1)


@dataclass(frozen=True, slots=True)
class FeatureOrder:
    """What the proposer of a session is to be sent, from position 0."""

    epoch: int  # of the session's Open
    spec: FeatureSpec
    window: FeatureWindow  # of the proposer's, shared by its sessions: what rounds committed
    prompts: FeatureWindow = field(default_factory=FeatureWindow)  # likewise, for what is more


class FeatureRows(NamedTuple):
    """Rows of one session, computed and committed."""

    session_id: int
    order: FeatureOrder
    start: int  # position of the first
    rows: bytes | memoryview  # bfloat16, little-endian [n, order.spec.width]
    of_prompt: bool = False  # more than a round commits: others need not wait for them

    @property
    def window(self) -> FeatureWindow:
        """Where they count until they are read."""
        return self.order.prompts if self.of_prompt else self.order.window


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """What one engine step has for proposers that asked."""

    rows: tuple[FeatureRows, ...]
    seconds: float  # of the engine's thread


def parse_features(text: str, num_layers: int, hidden_size: int) -> FeatureSpec:
    """What `--hidden-features` says of a model of that size: "final", "eagle3", "2,4,5", "8,final".

    "eagle3" is what EAGLE-3 modules read whose files name no layers, and what those read that are
    trained here. Layers are sorted; each state is kept once. Raises `ConfigError`.
    """
    layers: set[int] = set()
    final_norm = False
    for part in (part.strip() for part in text.split(",")):
        if part == "final":
            final_norm = True
        elif part == "eagle3":
            if num_layers < 6:
                raise ConfigError(
                    f"--hidden-features eagle3 needs a model of at least 6 layers, not {num_layers}"
                )
            layers |= {*default_layers(num_layers), *trained_layers(num_layers)}
        elif part.isascii() and part.isdigit() and int(part) <= num_layers:
            layers.add(int(part))
        else:
            raise ConfigError(
                f"--hidden-features {text!r}: {part!r} is none of 'final', 'eagle3' and the "
                f"numbers 0 to {num_layers} (entering that layer; {num_layers}: leaving the last)"
            )
    return FeatureSpec(hidden_size, tuple(sorted(layers)), final_norm)
