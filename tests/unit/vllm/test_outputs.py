"""vLLM's outputs as commits and accounts; its scheduler's sums as rounds."""

from __future__ import annotations

from types import SimpleNamespace as Record
from typing import Any

import pytest

from outrider.counts import sum_rounds
from outrider.errors import InternalError
from outrider.params import VerificationRule
from outrider.types import FinishReason, Request, TokenKind
from outrider.vllm.outputs import Progress
from outrider.vllm.stats import Load, rounds_of

TIMES = Record(queued_ts=1.0, scheduled_ts=1.5, first_token_ts=2.0, last_token_ts=3.0)


def progress(k: int = 0, **fields: Any) -> Progress:
    request = Request(session_id=7, prompt_token_ids=(1, 2, 3), **fields)
    return Progress(request, k, VerificationRule.REJECTION)


def output(*token_ids: int, finish: str | None = None, **part: Any) -> Record:
    completion = Record(token_ids=list(token_ids), finish_reason=finish, logprobs=None, **part)
    return Record(
        outputs=[completion],
        finished=finish is not None,
        num_cached_tokens=2,
        metrics=TIMES,
        prompt_logprobs=None,
    )


def test_outputs_become_commits_one_after_another() -> None:
    made = progress()
    first, last = made.commit(output(10)), made.commit(output(11, finish="length"))
    assert (first.session_id, first.base_len, first.token_ids) == (7, 3, (10,))
    assert (first.finish_reason, first.stats) == (None, None)
    assert (last.base_len, last.finish_reason) == (4, FinishReason.LENGTH)
    stats = last.stats
    assert stats is not None
    assert (stats.output_tokens, stats.rounds, stats.k_histogram) == (2, 2, (2,))
    assert (stats.queue_ms, stats.prefill_ms, stats.score_ms) == (500.0, 500.0, 1000.0)
    assert (stats.cached_prompt_tokens, stats.verification) == (2, VerificationRule.REJECTION)


def test_stop_token_ends_the_text_without_being_part_of_it() -> None:
    commit = progress(k=2).commit(output(10, 11, finish="stop"))
    assert (commit.token_ids, commit.stop_token_id) == ((10,), 11)
    assert commit.kinds == (TokenKind.ACCEPTED,)
    assert commit.stats is not None
    assert commit.stats.output_tokens == 1


@pytest.mark.parametrize(("count", "ids"), [(0, []), (1, [2, 4])])
def test_prompts_logprobs_come_with_the_first_output(count: int, ids: list[int]) -> None:
    made, first = progress(prompt_logprobs=count), output(10)
    likely = {2: Record(logprob=-0.1)}, {3: Record(logprob=-3.0), 4: Record(logprob=-0.2)}
    first.prompt_logprobs = [None, *likely]
    told = made.commit(first).prompt_logprobs
    assert told is not None
    assert (told.logprobs, told.top_token_ids) == ([-0.1, -3.0], ids)
    assert told.top_logprobs == [-0.1, -0.2][: len(ids)]
    assert made.commit(output(11, finish="length")).prompt_logprobs is None


def test_kinds_follow_from_how_many_tokens_came_at_once() -> None:
    made = progress(k=2, running_stats=True)
    accepted, plain = TokenKind.ACCEPTED, TokenKind.PLAIN
    assert made.commit(output(1)).kinds == (plain,)
    assert made.commit(output(1, 2)).kinds == (accepted, TokenKind.RECOVERED)
    merged = made.commit(output(1, 2, 3, 4))  # two steps, read late
    assert merged.kinds == (accepted, accepted, TokenKind.BONUS, plain)
    assert merged.stats is not None
    assert (merged.stats.rounds, merged.stats.accepted_per_pos) == (4, (2, 1))


def test_last_output_tells_what_was_drafted() -> None:
    made = progress(k=2)
    made.commit(output(1))
    told = Record(per_step_drafted=[2, 2], per_step_accepted=[2, 1])  # one behind the end
    made.commit(output(1, 2, 3))
    stats = made.commit(output(4, finish="length", spec_decode_metrics=told)).stats
    assert stats is not None
    assert (stats.drafted, stats.accepted, stats.rounds) == (4, 2, 3)
    assert stats.k_histogram == (1, 0, 2)


def test_logprobs_name_the_likeliest_in_falling_order() -> None:
    known = {5: Record(logprob=-2.0), 6: Record(logprob=-0.5), 7: Record(logprob=-1.0)}
    told = output(5)
    told.outputs[0].logprobs = [known]
    [logprobs] = progress(top_logprobs=2).commit(told).logprobs
    assert (logprobs.logprob, logprobs.top) == (-2.0, ((6, -0.5), (7, -1.0)))


def test_ending_for_a_reason_of_vllms_own_is_an_error() -> None:
    with pytest.raises(InternalError, match="vLLM ended the request: error"):
        progress().commit(output(finish="error"))


@pytest.mark.parametrize(
    ("drafts", "drafted", "accepted_at"),
    [(0, 0, []), (3, 12, [3, 1, 0, 0]), (3, 7, [2, 2, 1]), (2, 4, [1, 1, 1])],
)
def test_rounds_have_the_sums_that_vllm_tells(
    drafts: int, drafted: int, accepted_at: list[int]
) -> None:
    rounds = rounds_of(drafts, drafted, accepted_at)
    sums = sum_rounds(rounds)
    assert (rounds.total(), sums.drafted, sums.accepted) == (drafts, drafted, sum(accepted_at))
    assert [sums.by_position[i] for i in range(len(accepted_at))] == accepted_at
    assert all(accepted <= k for k, accepted in rounds)


def test_load_sums_up_data_parallel_engines() -> None:
    load = Load()
    load.total_pages = 100
    for engine, running in ((0, 3), (1, 2), (0, 4)):
        told = Record(num_running_reqs=running, num_waiting_reqs=1, kv_cache_usage=0.25)
        told.spec_decoding_stats = None
        load.record(told, engine)
    snapshot = load.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.free_pages) == (6, 2, 75)
