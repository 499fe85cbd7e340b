"""The account of a request, whoever served it and wherever it was cut."""

from __future__ import annotations

from gateway.account import Account
from outrider.params import VerificationRule
from outrider.types import TokenKind
from outrider.v1 import common_pb2

ACCEPTED, BONUS = TokenKind.ACCEPTED, TokenKind.BONUS
RECOVERED, PLAIN = TokenKind.RECOVERED, TokenKind.PLAIN


def test_account_of_one_scorer_equals_the_scorers() -> None:
    account = Account()
    account.observe([ACCEPTED, ACCEPTED, BONUS])
    reported = common_pb2.AuxInfo(
        **{"iter_count": 4, "rounds": 1, "drafted": 3, "accepted": 2, "accepted_per_pos": [1, 1]},
        **{
            "k_histogram": [0, 0, 0, 1],
            "score_ms": 2.5,
            "scorer_id": "s",
            "verification": "coupled",
        },
    )
    account.report(common_pb2.Usage(cached_prompt_tokens=16), reported)
    account.end_segment()
    result = account.close(output_len=3, cost_time_ms=10)
    assert (result.iter_count, result.drafted, result.score_ms) == (4, 3, 2.5)
    assert (result.output_len, result.avg_tokens_per_iter) == (3, 0.75)
    assert (result.cost_time, result.cached_prompt_tokens, result.scorer_id) == (10, 16, "s")


def test_account_with_dead_scorer_adds_what_was_seen() -> None:
    account = Account()
    account.observe([ACCEPTED, RECOVERED, PLAIN])  # two rounds in one message
    account.observe([])
    account.end_segment()
    account.retries += 1
    account.observe([ACCEPTED, ACCEPTED, BONUS])
    reported = common_pb2.AuxInfo(
        **{"iter_count": 2, "rounds": 1, "drafted": 2, "accepted": 2, "accepted_per_pos": [1, 1]},
        **{"proposer_ids": ["a"], "scorer_id": "second"},
    )
    account.report(common_pb2.Usage(cached_prompt_tokens=48), reported)
    account.end_segment()
    result = account.close(output_len=6, cost_time_ms=1)
    assert (result.iter_count, result.rounds, result.retries) == (4, 3, 1)
    assert (result.drafted, result.accepted) == (4, 3)
    assert list(result.accepted_per_pos) == [2, 1]
    assert (list(result.proposer_ids), result.scorer_id) == (["a"], "second")


def test_cached_tokens_at_successor_are_not_counted() -> None:
    account = Account()
    account.observe([PLAIN])
    account.end_segment()  # it died without a report
    account.report(common_pb2.Usage(cached_prompt_tokens=48), common_pb2.AuxInfo())
    account.end_segment()
    assert account.cached_prompt_tokens == 0
    assert account.close(output_len=1, cost_time_ms=1).cached_prompt_tokens == 0


def test_cached_tokens_after_silent_scorer_are_counted() -> None:
    account = Account()
    account.end_segment()  # it was full
    account.report(common_pb2.Usage(cached_prompt_tokens=16), common_pb2.AuxInfo())
    account.end_segment()
    assert account.cached_prompt_tokens == 16


def test_accepted_tokens_behind_cut_are_not_counted() -> None:
    account = Account()
    account.observe([ACCEPTED, ACCEPTED, BONUS])
    account.observe([ACCEPTED, ACCEPTED, RECOVERED])
    account.end_segment()
    result = account.close(output_len=4, cost_time_ms=1)
    assert result.accepted == 3
    assert list(result.accepted_per_pos) == [2, 1]
    assert result.output_len == 4


def test_account_without_tokens_is_empty() -> None:
    account = Account()
    account.end_segment()
    assert account.close(output_len=0, cost_time_ms=1).avg_tokens_per_iter == 0


def reported(verification: str, *, exact: bool, **by_method: tuple[int, int]) -> common_pb2.AuxInfo:
    return common_pb2.AuxInfo(
        scorer_id="s",
        verification=verification,
        exact=exact,
        accepted=sum(accepted for _, accepted in by_method.values()),
        accepted_per_pos=[sum(accepted for _, accepted in by_method.values())],
        drafts_per_context=[1, 2],
        accepted_per_context=[0, sum(accepted for _, accepted in by_method.values())],
        by_method=[
            common_pb2.MethodCounts(method=method, drafted=drafted, accepted=accepted)
            for method, (drafted, accepted) in by_method.items()
        ],
    )


def test_methods_over_segments_add_up() -> None:
    account = Account()
    for segment in (
        reported("coupled", exact=True, ngram=(4, 2)),
        reported("coupled", exact=True, suffix=(3, 1), ngram=(2, 1)),
    ):
        account.report(common_pb2.Usage(), segment)
        account.end_segment()
    result = account.close(output_len=9, cost_time_ms=1)
    counts = [(each.method, each.drafted, each.accepted) for each in result.by_method]
    assert counts == [("ngram", 6, 3), ("suffix", 3, 1)]
    assert list(result.drafts_per_context) == [2, 4]
    assert list(result.accepted_per_context) == [0, 4]
    assert (result.verification, result.exact) == ("coupled", True)


def test_methods_with_cut_text_lose_what_was_cut() -> None:
    account = Account()
    account.observe([ACCEPTED, BONUS] * 3)
    account.report(common_pb2.Usage(), reported("coupled", exact=True, suffix=(2, 2), ngram=(2, 1)))
    account.end_segment()
    result = account.close(output_len=2, cost_time_ms=1)
    assert [(each.method, each.accepted) for each in result.by_method] == [
        ("suffix", 1),
        ("ngram", 0),
    ]
    assert list(result.accepted_per_context) == [0, 1]
    assert result.accepted == 1


def test_exactness_with_one_lossy_segment_is_lossy() -> None:
    account = Account(VerificationRule.TYPICAL)
    account.observe([ACCEPTED, BONUS])  # a scorer that died: what was asked for counts
    account.end_segment()
    account.report(common_pb2.Usage(), reported("coupled", exact=True))
    account.end_segment()
    result = account.close(output_len=2, cost_time_ms=1)
    assert (result.verification, result.exact) == ("coupled", False)


def test_exactness_of_silent_scorer_is_ignored() -> None:
    account = Account(VerificationRule.TYPICAL)
    account.end_segment()  # it was full
    account.report(common_pb2.Usage(), reported("coupled", exact=True))
    account.end_segment()
    assert account.close(output_len=0, cost_time_ms=1).exact
