"""Hidden states that proposers may ask for. This module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outrider.aux_layers import default_layers, trained_layers
from outrider.errors import ConfigError

BYTES_PER_VALUE: Final = 2
"""Features travel as bfloat16, little-endian."""

MAX_ON_THE_WAY: Final = 8 * 2**20
"""Bytes of rows of rounds that one proposer has not read yet, and as many of prompts. Those of
rounds fit into one message of gRPC."""


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The content of one feature row: states of one position, one after the other.

    Row p comes from the forward of the tokens up to and including p. `layers` follow Hugging Face's
    `hidden_states`: i is the residual stream that enters decoder layer i (0-based, no norm), and
    the number of layers is the output of the last one.
    """

    hidden_size: int  # of the target
    layers: tuple[int, ...] = ()
    final_norm: bool = False  # then the final norm's output, which the target's head reads
    projection_dim: int = 0  # 0: no projection
    projection_sha256: bytes = b""  # of the bfloat16 matrix [projection_dim, captured_width]

    @property
    def captured_width(self) -> int:
        """Return the values of a row before the projection."""
        return self.hidden_size * (len(self.layers) + self.final_norm)

    @property
    def width(self) -> int:
        """Return the values of a row as it is sent."""
        return self.projection_dim or self.captured_width

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row as it is sent."""
        return self.width * BYTES_PER_VALUE

    @property
    def projection_bytes(self) -> int:
        """Return the bytes of the projection's matrix."""
        return self.projection_dim * self.captured_width * BYTES_PER_VALUE

    @property
    def states(self) -> tuple[str, ...]:
        """Return the states of a row, in order, as `--hidden-features` names them."""
        return (*map(str, self.layers), *(("final",) if self.final_norm else ()))


class FeatureWindow:
    """Bytes on their way to one proposer. Only the engine's thread changes the count."""

    __slots__ = ("on_the_way", "short")

    def __init__(self) -> None:
        self.on_the_way = 0
        self.short = False
        """Rows wait for room."""

    def room(self, row_bytes: int) -> int:
        """Return the rows that may follow: at least one if nothing is on its way."""
        rows = (MAX_ON_THE_WAY - self.on_the_way) // row_bytes
        return max(rows, 0 if self.on_the_way else 1)


@dataclass(frozen=True, slots=True)
class FeatureOrder:
    """Hidden states that the proposer of a session is to be sent, from position 0."""

    epoch: int  # of the session's Open
    spec: FeatureSpec
    window: FeatureWindow  # for rows of rounds, shared by the proposer's sessions
    prompts: FeatureWindow = field(default_factory=FeatureWindow)  # for rows of prompts, likewise


class FeatureRows(NamedTuple):
    """Rows of one session."""

    session_id: int
    order: FeatureOrder
    start: int  # position of the first
    rows: bytes | memoryview  # bfloat16, little-endian [n, order.spec.width]
    of_prompt: bool = False  # more rows than a round commits

    @property
    def window(self) -> FeatureWindow:
        """Return the window that counts the rows until they are read."""
        return self.order.prompts if self.of_prompt else self.order.window


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """Hidden states that one engine step has for proposers."""

    rows: tuple[FeatureRows, ...]
    seconds: float  # that the engine's thread spent


def parse_features(text: str, num_layers: int, hidden_size: int) -> FeatureSpec:
    """Parse `--hidden-features`: "final", "eagle3", "2,4,5", "8,final".

    "eagle3" stands for the default layers of EAGLE-3 modules, and for those of modules that are
    trained here. Layers are sorted, each once. Raises `ConfigError`.
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
