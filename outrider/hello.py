"""The Hello of a proposer, wherever it runs."""

from __future__ import annotations

from outrider.drafting.proposer import ProposerTraits
from outrider.rpc.feature_codec import features_to_proto
from outrider.rpc.versions import PROTOCOL_VERSION
from outrider.v1 import draft_pb2


def make_hello(
    traits: ProposerTraits, tokenizer_hash: str, *, proposer_id: str, pool: str, device: str
) -> draft_pb2.Hello:
    """Return a Hello of a method with these traits, without fields of its connection."""
    return draft_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        proposer_id=proposer_id,
        method=traits.method,
        model=traits.model,
        vocab_size=traits.vocab_size,
        tokenizer_hash=tokenizer_hash,
        max_sessions=traits.max_sessions,
        max_draft_tokens=traits.max_draft_tokens,
        max_model_len=traits.max_model_len,
        pool=pool,
        runs_ahead=traits.runs_ahead,
        methods=traits.methods,
        features=features_to_proto(traits.features),
        device=device,
    )
