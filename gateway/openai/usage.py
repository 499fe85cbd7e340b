"""What an answer cost and what speculation did for it, under OpenAI's names and vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from gateway.generation import Ending
from outrider.v1 import common_pb2


def aux_info(infos: Sequence[common_pb2.AuxInfo]) -> dict[str, Any]:
    """Return the fields that tell of speculation: one object for one choice, a list for several."""
    shown = [_fields(info) for info in infos]
    if len(shown) > 1:
        return {"aux_info": shown}
    return {"aux_info": shown[0], "metrics": {"speculative_decoding": _vllm_metrics(infos[0])}}


def _fields(info: common_pb2.AuxInfo) -> dict[str, Any]:
    """Every field of AuxInfo under its own name, zeros included."""
    fields: dict[str, Any] = MessageToDict(
        info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def counts(prompt: int, completion: int) -> dict[str, int]:
    """Return the fields of `usage` for so many tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _vllm_metrics(info: common_pb2.AuxInfo) -> dict[str, Any] | None:
    """Return speculation under vLLM's names; None if nothing was drafted.

    A step counts if it verified a draft. acceptance_histogram[j]: steps that accepted j tokens.
    """
    steps, most = sum(info.k_histogram[1:]), len(info.k_histogram) - 1
    if not steps:
        return None
    reached = [steps, *info.accepted_per_pos, *([0] * most)][: most + 1]
    after = [*reached[1:], 0]
    return {
        "mean_acceptance_length": 1 + info.accepted / steps,
        "draft_acceptance_rate": info.accepted / max(1, info.drafted),
        "acceptance_histogram": [here - there for here, there in zip(reached, after, strict=True)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": info.accepted,
        "num_draft_tokens": info.drafted,
        "num_spec_tokens": most,
    }


def prediction_usage(endings: Sequence[Ending]) -> dict[str, int]:
    """Return what became of the client's prediction, in tokens."""
    copied = [
        counts
        for ending in endings
        for counts in ending.aux_info.by_method
        if counts.method == "deterministic"
    ]
    accepted = sum(counts.accepted for counts in copied)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(counts.drafted for counts in copied) - accepted,
    }
