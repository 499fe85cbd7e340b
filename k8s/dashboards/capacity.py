"""The capacity dashboard, of full resources and of the signals of autoscalers."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from k8s.dashboards.panels import HERE, MODEL, Graph, Series, build, mean, rate, total

_STEP = "outrider:step_time_seconds"
_FORWARD = f'{MODEL},part="forward"'


def capacity() -> Dashboard:
    """Return the dashboard of caches, rows, pools and the signals of autoscalers."""
    fates = total("outrider:pool_rounds_total", "pool")
    late = total("outrider:pool_rounds_total", "pool", f'{MODEL},fate="late"')
    queue_p95 = total("outrider:request_queue_time_seconds_bucket", "le")
    return build(
        "outrider-capacity",
        "Outrider: capacity",
        "KV cache, rows, draft pools, gateways, and the signals that autoscalers follow.",
        {
            "Signals of autoscaling": (
                Graph(
                    "Proposers: late drafts",
                    "Rounds whose draft came too late, of those that wanted one, by pool. Above "
                    "0.2 a pool is too small, or too far away.",
                    "percentunit",
                    (Series(f"{late} / {fates}", "{{pool}}"),),
                ),
                Graph(
                    "Proposers: cycle utilisation",
                    "Part of the time that a proposer drafts what is waited for, by pool.",
                    "percentunit",
                    (
                        Series(
                            f"avg by (pool) ({rate('outrider:proposer_cycle_seconds_sum', HERE)})",
                            "{{pool}}",
                        ),
                    ),
                ),
                Graph(
                    "Scorers: queue",
                    "95th percentile of a request's time in the queue.",
                    "s",
                    (Series(f"histogram_quantile(0.95, {queue_p95})", "p95"),),
                ),
            ),
            "Scorers": (
                Graph(
                    "KV cache in use",
                    "By scorer. Cached prefixes that nobody uses count as free.",
                    "percentunit",
                    (Series(f"outrider:kv_cache_usage_perc{{{MODEL}}}", "{{instance}}"),),
                ),
                Graph(
                    "Requests",
                    "In the batch, in the queue, and without a proposer though they want one.",
                    "short",
                    tuple(
                        Series(f"sum (outrider:num_requests_{name}{{{MODEL}}})", name)
                        for name in ("running", "waiting", "undrafted")
                    ),
                ),
                Graph(
                    "Mean step",
                    "Rows and query tokens of a step.",
                    "short",
                    tuple(
                        Series(f"{total(f'{name}_sum')} / {total(f'{name}_count')}", legend)
                        for name, legend in (
                            ("outrider:step_rows", "rows"),
                            ("outrider:iteration_tokens_total", "tokens"),
                        )
                    ),
                ),
                Graph(
                    "Tokens per second",
                    "Prompts as they are admitted, output as it is generated.",
                    "short",
                    (
                        Series(total("outrider:prompt_tokens_total"), "prompt"),
                        Series(total("outrider:generation_tokens_total"), "generated"),
                    ),
                ),
                Graph(
                    "Prefix cache hits",
                    "Part of the prompt tokens that were in the cache.",
                    "percentunit",
                    (
                        Series(
                            f"{total('outrider:prefix_cache_hits_total')} / "
                            f"{total('outrider:prefix_cache_queries_total')}",
                            "hits",
                        ),
                    ),
                ),
                Graph(
                    "Preemptions and ends",
                    "Requests preempted for lack of pages; requests that ended, by reason.",
                    "reqps",
                    (
                        Series(total("outrider:num_preemptions_total"), "preempted"),
                        Series(
                            total("outrider:request_success_total", "finished_reason"),
                            "{{finished_reason}}",
                        ),
                    ),
                ),
            ),
            "Hidden states": (
                Graph(
                    "Sent to proposers",
                    "Of what scorers send to proposers that draft from hidden states. A pool that "
                    "is not a sidecar takes it over the network.",
                    "Bps",
                    (Series(total("outrider:feature_bytes_total", "instance"), "{{instance}}"),),
                ),
                Graph(
                    "Bytes per token",
                    "Of those whose states were read. Prompts are sent, too, also those that the "
                    "prefix cache held; less is sent than read where a session moves.",
                    "bytes",
                    (
                        Series(
                            f"{total('outrider:feature_bytes_total')} / "
                            f"{total('outrider:feature_rows_total')}",
                            "bytes",
                        ),
                    ),
                ),
                Graph(
                    "Time per step",
                    "Mean time that the engine's thread spends on reading states, beside the mean "
                    "forward.",
                    "s",
                    (
                        Series(
                            f"{total('outrider:feature_seconds_total')} / "
                            f"{total('outrider:step_rows_count')}",
                            "reading states",
                        ),
                        Series(
                            f"{total(f'{_STEP}_sum', matchers=_FORWARD)} / "
                            f"{total(f'{_STEP}_count', matchers=_FORWARD)}",
                            "forward",
                        ),
                    ),
                ),
            ),
            "Draft pools": (
                Graph(
                    "Proposers attached",
                    "Streams between proposers and scorers, by pool, as the scorers see it.",
                    "short",
                    (
                        Series(
                            f"sum by (pool, method) (outrider:proposers_attached{{{MODEL}}})",
                            "{{pool}} ({{method}})",
                        ),
                    ),
                ),
                Graph(
                    "Sessions",
                    "Held by a pool, and what it can hold.",
                    "short",
                    (
                        Series(f"sum by (pool) (outrider:proposer_sessions{{{HERE}}})", "{{pool}}"),
                        Series(
                            f"sum by (pool) (outrider:proposer_session_limit{{{HERE}}})",
                            "{{pool}} limit",
                        ),
                    ),
                ),
                Graph(
                    "Tokens drafted per second",
                    "Drafted on demand, and guessed ahead while the scorer verified.",
                    "short",
                    (
                        Series(
                            total("outrider:proposer_draft_tokens_total", "pool", HERE),
                            "{{pool}}",
                        ),
                        Series(
                            total("outrider:proposer_ahead_tokens_total", "pool", HERE),
                            "{{pool}} ahead",
                        ),
                    ),
                ),
                Graph(
                    "Sessions in a cycle",
                    "Mean over drafting cycles, by pool.",
                    "short",
                    (Series(mean("outrider:proposer_cycle_sessions", "pool", HERE), "{{pool}}"),),
                ),
                Graph(
                    "Time ahead",
                    "Part of a proposer's time spent on guessing past its drafts, in which nobody "
                    "waits for it.",
                    "percentunit",
                    (
                        Series(
                            f"avg by (pool) ({rate('outrider:proposer_ahead_seconds_sum', HERE)})",
                            "{{pool}}",
                        ),
                    ),
                ),
                Graph(
                    "Seconds of a loop",
                    "By the rows that the draft model ran for, padding included.",
                    "s",
                    (
                        Series(
                            mean("outrider:proposer_loop_seconds", "pool, rows", HERE),
                            "{{pool}} {{rows}} rows",
                        ),
                    ),
                ),
                Graph(
                    "Rows of loops",
                    "Drafts that are waited for, and branches ahead, without padding.",
                    "cps",
                    (
                        Series(
                            total("outrider:proposer_loop_rows_total", "pool, kind", HERE),
                            "{{pool}} {{kind}}",
                        ),
                    ),
                ),
                Graph(
                    "Scorers connected",
                    "By proposer: 0 means that every scorer is away or refuses it.",
                    "short",
                    (Series(f"outrider:proposer_links{{{HERE}}}", "{{pool}} {{instance}}"),),
                ),
                Graph(
                    "Sessions turned away or evicted, messages dropped",
                    "Without room newcomers are turned away; one is tried again every second.",
                    "cps",
                    (
                        Series(
                            total("outrider:proposer_lost_sessions_total", "pool", HERE),
                            "{{pool}} turned away",
                        ),
                        Series(
                            total("outrider:proposer_malformed_messages_total", "pool", HERE),
                            "{{pool}} dropped",
                        ),
                    ),
                ),
            ),
            "Gateways": (
                Graph(
                    "Open streams",
                    "Completions under way, and how many may be.",
                    "short",
                    (
                        Series(f"outrider:gateway_requests_in_flight{{{HERE}}}", "{{instance}}"),
                        Series(f"outrider:gateway_requests_limit{{{HERE}}}", "{{instance}} limit"),
                    ),
                    width=12,
                ),
                Graph(
                    "Tokens per second",
                    "Of completions that ended well, at their end.",
                    "short",
                    (
                        Series(
                            total("outrider:gateway_prompt_tokens_total", matchers=HERE), "prompt"
                        ),
                        Series(
                            total("outrider:gateway_generation_tokens_total", matchers=HERE),
                            "generated",
                        ),
                    ),
                    width=12,
                ),
                Graph(
                    "Requests by outcome",
                    "ok, cancelled, or an error's reason; refused: too many were under way.",
                    "reqps",
                    (
                        Series(
                            total("outrider:gateway_requests_total", "outcome", HERE),
                            "{{outcome}}",
                        ),
                        Series(
                            total("outrider:gateway_requests_refused_total", matchers=HERE),
                            "refused",
                        ),
                    ),
                    width=12,
                ),
                Graph(
                    "Scorers and retries",
                    "Scorers that gateways can reach, and completions moved to another one.",
                    "short",
                    (
                        Series(f"min (outrider:gateway_scorers_serving{{{HERE}}})", "scorers"),
                        Series(
                            total("outrider:gateway_retries_total", matchers=HERE),
                            "retries per second",
                        ),
                    ),
                    width=12,
                ),
            ),
            "Scorers as the gateways see them": (
                Graph(
                    "Requests",
                    "By gateway: in its scorers' batches, and waiting there or held for a scorer.",
                    "short",
                    tuple(
                        Series(f"max (outrider:gateway_num_requests_{name}{{{HERE}}})", name)
                        for name in ("running", "waiting")
                    ),
                ),
                Graph(
                    "KV cache in use",
                    "Of all scorers that a gateway reaches.",
                    "percentunit",
                    (Series(f"max (outrider:gateway_kv_cache_usage_perc{{{HERE}}})", "in use"),),
                ),
                Graph(
                    "Holding",
                    "How long a request is held while no scorer serves; 0: it needs one at once.",
                    "s",
                    (Series(f"max (outrider:gateway_hold_seconds{{{HERE}}})", "at most"),),
                ),
            ),
            "Processes": (
                Graph(
                    "Versions",
                    "Running processes by component and version.",
                    "short",
                    (
                        Series(
                            f"count by (component, version) (outrider:build_info{{{HERE}}})",
                            "{{component}} {{version}}",
                        ),
                    ),
                    width=24,
                ),
            ),
        },
    )
