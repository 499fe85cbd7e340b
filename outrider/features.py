"""What a hidden-state method needs of the target's forward. No torch: it crosses the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BYTES_PER_VALUE: Final = 2
"""Features travel as bfloat16, little-endian."""


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
