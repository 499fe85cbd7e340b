"""The benchmark's arithmetic: what it reports must follow from what was measured."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from benchmarks import fixed_k, stats
from benchmarks.measure import Cell
from benchmarks.prompts import Prompts, repetition
from benchmarks.records import Completion, Run, first_divergence
from benchmarks.report import Bar, Equality
from benchmarks.to_gguf import gguf_name
from outrider.engine.policy.adaptive import AdaptivePolicy
from outrider.engine.policy.draft_mode import DraftMode
from outrider.engine.policy.mode_trials import ModeTrials
from outrider.engine.policy.row import Drafting


def run(num_tokens: int, wall_s: float) -> Run:
    return Run((Completion(tuple(range(num_tokens)), wall_s, wall_s / 2),), wall_s)


def test_ratio_is_paired_by_round() -> None:
    # The machine slowed down fourfold in the second round; the ratio does not see it.
    ours = Cell("a", 1, [run(100, 1.0), run(100, 4.0)])
    theirs = Cell("b", 1, [run(100, 2.0), run(100, 8.0)])
    assert stats.ratio(ours, theirs) == 2.0


def test_speeds() -> None:
    numbers = stats.speeds(Cell("a", 1, [run(11, 2.0)], foreign_cpu=[0.0]))
    assert numbers["tokens_per_s"] == 5.5
    assert numbers["ttft_ms"] == 1000.0
    assert numbers["tpot_ms"] == 100.0


def test_acceptance_counts_rounds_with_a_draft_and_hits_are_apart() -> None:
    # 10 rounds, 2 of them without a draft; 8 drafts of 4 tokens, half accepted.
    completion = Completion(
        tuple(range(26)),
        1.0,
        stats={"undrafted_rounds": 2.0, "hits": 6.0, "misses_late": 1.0, "misses_wrong": 1.0},
    )
    numbers = stats.speculation(Cell("a", 1, [Run((completion,), 1.0, 10, 32, 16)]))
    assert numbers["mean_acceptance_length"] == 3.0
    assert numbers["acceptance_rate"] == 0.5
    assert numbers["hit_rate"] == 0.75
    assert numbers["tokens_per_round"] == 2.6


def test_systems_that_tell_only_rounds_get_tokens_per_round() -> None:
    numbers = stats.speculation(Cell("a", 1, [Run(run(30, 1.0).completions, 1.0, 10)]))
    assert numbers == {"mean_acceptance_length": 3.0}


def test_host_overhead_is_a_round_without_its_forwards() -> None:
    # Two rounds after the first token, 10 ms each: 3 ms drafting, 6 ms scoring (0.5 ms of it
    # verification, which is no forward).
    completion = Completion(
        (1, 2, 3),
        0.1,
        stats={"propose_ms": 6.0, "score_ms": 12.0},
        round_gaps_s=(0.010, 0.010),
    )
    assert stats.host_overhead_ms([completion], verify_ms=0.5) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (1,), 0)],
)
def test_first_divergence(a: tuple[int, ...], b: tuple[int, ...], expected: int | None) -> None:
    assert first_divergence(a, b) == expected


def test_equality_fails_only_where_it_is_demanded() -> None:
    assert not Equality("", True, (None, 3)).ok
    assert Equality("", False, (None, 3)).ok
    assert Equality("", True, (None, None)).ok


def test_bars() -> None:
    assert Bar("", 2.0, 2.0).ok
    assert not Bar("", 1.9, 2.0).ok
    assert Bar("", 1.4, 1.5, at_most=True).ok


def test_prompt_groups_go_round() -> None:
    prompts = Prompts(((1,), (2,), (3,)), "", "")
    assert prompts.group(1, 2) == ((3,), (1,))


def test_repetition() -> None:
    assert repetition([tuple(range(20))]) == 0.0
    assert repetition([(7,) * 16]) == pytest.approx(8 / 9)


def test_gguf_names_every_tensor_of_a_llama() -> None:
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.layers.7.self_attn.q_proj.weight") == "blk.7.attn_q.weight"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.self_attn.q_norm.weight")


def test_missing_prompts_are_a_readable_error(tmp_path: Path) -> None:
    from benchmarks.prompts import PromptsError, load

    with pytest.raises(PromptsError, match="does not exist"):
        load(tmp_path / "none.jsonl", tmp_path, count=1, max_prompt_tokens=8)


def test_whatever_the_trials_find_a_fixed_k_is_drafted_in_every_round() -> None:
    policy, drafting = AdaptivePolicy(4), Drafting(limit=4)
    with mock.patch.object(ModeTrials, "mode", DraftMode.OFF):
        assert (policy.may_wait, policy.choose_k(drafting, 4)) == (False, 0)
        try:
            fixed_k.fix()
            assert (policy.may_wait, policy.choose_k(drafting, 4)) == (True, 4)
            assert policy.mode is DraftMode.AHEAD
        finally:
            mock.patch.stopall()
