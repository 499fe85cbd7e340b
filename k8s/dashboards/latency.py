"""The latency dashboard, of the time that clients wait and its parts."""

from __future__ import annotations

from typing import Literal

from grafana_foundation_sdk.builders.dashboard import Dashboard

from k8s.dashboards.panels import HERE, MODEL, Graph, Series, Traces, build, quantiles, total

# The gateways' operations are chat and text_completion, the scorers' is generate.
_CLIENTS = f'{HERE},gen_ai_operation_name!="generate",gen_ai_request_model=~"$model"'
_STEP = "outrider:step_time_seconds"
_FORWARD = f'{MODEL},part="forward"'
_TRACERS: tuple[Literal["tempo", "jaeger"], ...] = ("tempo", "jaeger")
_EXEMPLARS = " Dots are requests whose trace was kept: click one to open it."


def latency() -> Dashboard:
    """Return the dashboard of TTFT, TPOT, queues and the parts of rounds and steps."""
    rounds = total("outrider:spec_decode_num_rounds_total")
    return build(
        "outrider-latency",
        "Outrider: latency",
        "Time to first token, time per token, queues, and where rounds and steps spend theirs.",
        {
            "At the gateway": (
                Graph(
                    "Time to first token",
                    "From the request to its first token." + _EXEMPLARS,
                    "s",
                    quantiles(
                        "gen_ai_server_time_to_first_token_seconds", _CLIENTS, exemplars=True
                    ),
                ),
                Graph(
                    "Time per output token",
                    "After the first, mean of each request." + _EXEMPLARS,
                    "s",
                    quantiles(
                        "gen_ai_server_time_per_output_token_seconds", _CLIENTS, exemplars=True
                    ),
                ),
                Graph(
                    "Request duration",
                    "From the request to its last token." + _EXEMPLARS,
                    "s",
                    quantiles("gen_ai_server_request_duration_seconds", _CLIENTS, exemplars=True),
                ),
            ),
            "Before the first token": (
                Graph(
                    "Queue",
                    "From a request's arrival at the scorer to its first step.",
                    "s",
                    quantiles("outrider:request_queue_time_seconds"),
                    width=12,
                ),
                Graph(
                    "Prompt processing",
                    "From a request's first step to its first token.",
                    "s",
                    quantiles("outrider:request_prefill_time_seconds"),
                    width=12,
                ),
            ),
            "A round": (
                Graph(
                    "Mean round by part",
                    "wait, score and commit follow each other; propose and network are what the "
                    "draft took, hidden behind score as far as the proposer runs ahead.",
                    "s",
                    (
                        Series(
                            f"{total('outrider:round_seconds_total', 'part')} "
                            f"/ on () group_left () {rounds}",
                            "{{part}}",
                        ),
                    ),
                    width=12,
                ),
                Graph(
                    "Drafting cycle",
                    "In the proposers, by pool: 95th percentile of a cycle, and of its forward.",
                    "s",
                    tuple(
                        Series(
                            f"histogram_quantile(0.95, {total(bucket, 'pool, le', HERE)})",
                            legend,
                        )
                        for bucket, legend in (
                            ("outrider:proposer_cycle_seconds_bucket", "{{pool}} cycle"),
                            ("outrider:proposer_forward_seconds_bucket", "{{pool}} forward"),
                        )
                    ),
                    width=12,
                ),
            ),
            "A step": (
                Graph(
                    "Mean step by part",
                    "draft: of a scorer that drafts itself; idle: no row was ready; gap: host time "
                    "with no work on the device.",
                    "s",
                    (
                        Series(
                            f"{total(_STEP + '_sum', 'part')} / {total(_STEP + '_count', 'part')}",
                            "{{part}}",
                        ),
                    ),
                    width=12,
                ),
                Graph("Forward", "Of all steps.", "s", quantiles(_STEP, _FORWARD), width=12),
            ),
            "Traces": tuple(
                Traces(
                    f"Requests in {source.capitalize()}",
                    "The latest requests whose trace was kept (otel.sampleRatio), from the gateway "
                    "to the proposers. Choose the data source at the top.",
                    source,
                    "outrider-gateway",
                )
                for source in _TRACERS
            ),
        },
    )
