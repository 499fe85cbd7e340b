"""Between `FeatureSpec` and its message."""

from __future__ import annotations

from typing import Final

from outrider.features import FeatureSpec
from outrider.params import require
from outrider.v1 import draft_pb2

MAX_LAYERS: Final = 16
"""Layers whose states one proposer may ask for."""

_SHA256_BYTES: Final = 32


def features_to_proto(spec: FeatureSpec | None) -> draft_pb2.FeatureSpec | None:
    """None for methods that need tokens only."""
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
    """Raises `InvalidRequestError` for what no target could have."""
    # First of all: going through millions of them takes a second.
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
