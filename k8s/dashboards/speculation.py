"""The speculation dashboard, of what drafts bring and why they miss."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from k8s.dashboards.panels import MODEL, Graph, Number, Series, build, total

_DRAFTS = "outrider:spec_decode_num_drafts_total"
_DRAFTED = "outrider:spec_decode_num_draft_tokens_total"
_ACCEPTED = "outrider:spec_decode_num_accepted_tokens_total"
_PER_POS = "outrider:spec_decode_num_accepted_tokens_per_pos_total"
_DRAFTS_BY_CONTEXT = "outrider:spec_decode_num_drafts_per_context_total"
_ACCEPTED_BY_CONTEXT = "outrider:spec_decode_num_accepted_tokens_per_context_total"
_ROUNDS = "outrider:spec_decode_num_rounds_total"
_FATES = "outrider:pool_rounds_total"
_TOKENS = "outrider:generation_tokens_total"
_PLAIN_S, _DECODE_S = "outrider:decode_plain_seconds_total", "outrider:decode_seconds_total"


def speculation() -> Dashboard:
    """Return the dashboard of acceptance, hits, misses, K and goodput."""
    acceptance = f"{total(_ACCEPTED)} / {total(_DRAFTED)}"
    speedup = f"{total(_PLAIN_S)} / {total(_DECODE_S)}"
    accepted_by_model, drafts_by_model = (
        total(counter, "model_name") for counter in (_ACCEPTED, _DRAFTS)
    )
    hit = total(_FATES, matchers=f'{MODEL},fate="hit"')
    return build(
        "outrider-speculation",
        "Outrider: speculation",
        "Acceptance, hits and misses, draft lengths, and what speculation brings.",
        {
            "Now": (
                Number(
                    "Speedup",
                    "Time that the same output would have taken without drafts, by the measured "
                    "times of steps, over the time it took. Below 1 speculation costs.",
                    "short",
                    speedup,
                ),
                Number(
                    "Mean acceptance length",
                    "Tokens per round that verified a draft: 1 + accepted.",
                    "short",
                    f"1 + {total(_ACCEPTED)} / {total(_DRAFTS)}",
                ),
                Number(
                    "Acceptance rate",
                    "Draft tokens accepted, of those verified.",
                    "percentunit",
                    acceptance,
                ),
                Number(
                    "Hit rate",
                    "Rounds that had their draft at once, of those that wanted one.",
                    "percentunit",
                    f"{hit} / {total(_FATES)}",
                ),
            ),
            "Acceptance": (
                Graph(
                    "Acceptance by position",
                    "Part of the drafts of which the token at this position was accepted. A draft "
                    "that fails at position 0 does not fit the target.",
                    "percentunit",
                    (
                        Series(
                            f"{total(_PER_POS, 'position')} / on () group_left () {total(_DRAFTS)}",
                            "position {{position}}",
                        ),
                    ),
                    width=12,
                ),
                Graph(
                    "Mean acceptance length by model",
                    "Tokens per round that verified a draft.",
                    "short",
                    (Series(f"1 + {accepted_by_model} / {drafts_by_model}", "{{model_name}}"),),
                    width=12,
                ),
                Graph(
                    "Mean acceptance length by context",
                    "Tokens per round that verified a draft, by the tokens before it. Shorter for "
                    "long contexts: the drafts' model was made for shorter ones.",
                    "short",
                    (
                        Series(
                            f"1 + {total(_ACCEPTED_BY_CONTEXT, 'context')} / "
                            f"{total(_DRAFTS_BY_CONTEXT, 'context')}",
                            "from {{context}} tokens",
                        ),
                    ),
                    width=12,
                ),
                Graph(
                    "Draft tokens asked for and verified",
                    "K where a request names none, and the mean of rounds that had a draft. Far "
                    "below: longer drafts are measured not to pay.",
                    "short",
                    (
                        Series(
                            f"max by (model_name) (outrider:num_speculative_tokens{{{MODEL}}})",
                            "{{model_name}} asked for",
                        ),
                        Series(
                            f"{total(_DRAFTED, 'model_name')} / {drafts_by_model}",
                            "{{model_name}} verified",
                        ),
                    ),
                    width=12,
                ),
                Graph(
                    "Draft tokens verified per round",
                    "The distribution of K: how many draft tokens rounds verified. 0: no draft, "
                    "because none came in time or because it would not pay.",
                    "percentunit",
                    (Series(total(_ROUNDS, "num_draft_tokens"), "{{num_draft_tokens}}"),),
                    stack="percent",
                    width=12,
                ),
            ),
            "Hits and misses": (
                Graph(
                    "Steps by draft mode",
                    "none: nothing is drafted at this load, or by nobody; on demand: each draft "
                    "when the round before has ended; ahead: a row's proposer can draft beside its "
                    "verification. Drafts, or none, are tried now and then.",
                    "percentunit",
                    (Series(total("outrider:steps_total", "mode"), "{{mode}}"),),
                    stack="percent",
                ),
                Graph(
                    "Rounds by what became of their draft",
                    "hit: at hand at once; waited: came while the row waited; late: right or "
                    "unknown, but not there in time; wrong: for another text, guessed ahead or "
                    "drafted too late; none: the proposer had no guess.",
                    "percentunit",
                    (Series(total(_FATES, "fate"), "{{fate}}"),),
                    stack="percent",
                ),
                Graph(
                    "Acceptance rate by pool",
                    "Draft tokens accepted, of those verified, by the pool that drafted them.",
                    "percentunit",
                    (
                        Series(
                            f"{total('outrider:pool_accepted_tokens_total', 'pool')} / "
                            f"{total('outrider:pool_draft_tokens_total', 'pool')}",
                            "{{pool}}",
                        ),
                    ),
                ),
                Graph(
                    "Blocks dropped",
                    "stale: for an epoch that is over; malformed: a proposer's fault, after "
                    "several of which it is detached.",
                    "cps",
                    (Series(total("outrider:draft_blocks_total", "fate"), "{{fate}}"),),
                ),
            ),
            "Goodput": (
                Graph(
                    "Tokens per second, with speculation and without",
                    "Without: what the scorers would have generated in the same time in steps "
                    "without drafts, by the measured times of steps.",
                    "short",
                    (
                        Series(total(_TOKENS), "as it is"),
                        Series(
                            f"{total(_TOKENS)} * {total(_DECODE_S)} / {total(_PLAIN_S)}",
                            "without speculation (estimate)",
                        ),
                    ),
                ),
                Graph(
                    "Speedup by model",
                    "See above.",
                    "short",
                    (
                        Series(
                            f"{total(_PLAIN_S, 'model_name')} / {total(_DECODE_S, 'model_name')}",
                            "{{model_name}}",
                        ),
                    ),
                ),
                Graph(
                    "Tokens per round and per step",
                    "Per round: of one request. Per step: of all rows of a step.",
                    "short",
                    (
                        Series(f"{total(_TOKENS)} / {total(_ROUNDS)}", "per round"),
                        Series(
                            f"{total('outrider:step_output_tokens_sum')} / "
                            f"{total('outrider:step_output_tokens_count')}",
                            "per step",
                        ),
                    ),
                ),
            ),
        },
    )
