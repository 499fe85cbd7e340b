"""Converts `FeatureSpec`, and serializes messages with hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.features import FeatureRows, FeatureSpec
from outrider.params import require
from outrider.v1 import draft_pb2

MAX_LAYERS: Final = 16
"""Layers whose states one proposer may ask for."""

_SHA256_BYTES: Final = 32


def features_to_proto(spec: FeatureSpec | None) -> draft_pb2.FeatureSpec | None:
    """Return None for methods that need tokens only."""
    if spec is None:
        return None
    return draft_pb2.FeatureSpec(
        layers=spec.layers,
        final_norm=spec.final_norm,
        hidden_size=spec.hidden_size,
        projection_dim=spec.projection_dim,
        projection_sha256=spec.projection_sha256,
    )


def features_from_proto(msg: draft_pb2.FeatureSpec) -> FeatureSpec:
    """Raise `InvalidRequestError` for states that no target could have."""
    # Checked first, since going through millions of layers takes a second.
    require(len(msg.layers) <= MAX_LAYERS, "features.layers", f"at most {MAX_LAYERS}")
    layers = tuple(msg.layers)
    require(bool(layers) or msg.final_norm, "features.layers", "set, or final_norm")
    require(len(set(layers)) == len(layers), "features.layers", "different from each other")
    require(msg.hidden_size > 0, "features.hidden_size", "above 0")
    digest = msg.projection_sha256
    require(
        len(digest) == (_SHA256_BYTES if msg.projection_dim else 0),
        "features.projection_sha256",
        f"{_SHA256_BYTES} bytes with a projection, else none",
    )
    spec = FeatureSpec(msg.hidden_size, layers, msg.final_norm, msg.projection_dim, digest)
    require(
        spec.projection_dim <= spec.captured_width,
        "features.projection_dim",
        f"at most the width of a row, {spec.captured_width}",
    )
    return spec


@dataclass(frozen=True, slots=True)
class SessionMessage:
    """A `DraftResponse` of `sessions`, whose rows are copied only when it is serialized.

    `batch` has no features of its own.
    """

    batch: draft_pb2.SessionBatch
    features: Sequence[FeatureRows] = ()


def response_to_bytes(message: draft_pb2.DraftResponse | SessionMessage) -> bytes:
    """Serialize a message. Protobuf would copy its rows, which are megabytes, twice."""
    if isinstance(message, draft_pb2.DraftResponse):
        return message.SerializeToString()
    parts: list[bytes | memoryview] = [b"", message.batch.SerializeToString()]
    for each in message.features:
        head = draft_pb2.Features(
            session=each.session_id, epoch=each.order.epoch, start=each.start
        ).SerializeToString()
        head += _tagged(draft_pb2.Features.ROWS_FIELD_NUMBER, len(each.rows))
        number = draft_pb2.SessionBatch.FEATURES_FIELD_NUMBER
        parts += (_tagged(number, len(head) + len(each.rows)), head, each.rows)
    number = draft_pb2.DraftResponse.SESSIONS_FIELD_NUMBER
    parts[0] = _tagged(number, sum(map(len, parts)))
    return b"".join(parts)


def _tagged(number: int, size: int) -> bytes:
    """Return the head of a protobuf field of `size` bytes (wire type 2): two varints."""
    head = bytearray()
    for value in (number << 3 | 2, size):
        left = value
        while left > 0x7F:
            head.append(left & 0x7F | 0x80)
            left >>= 7
        head.append(left)
    return bytes(head)
