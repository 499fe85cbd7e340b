"""Builds the drafting methods that the configuration names: `_BUILDERS` is the registry."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from outrider.drafting.building.config import (
    DeterministicConfig,
    DraftModelConfig,
    HeadConfig,
    MethodConfig,
    NgramConfig,
    Say,
    SuffixConfig,
)
from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.hybrid import HybridProposer
from outrider.drafting.proposer import NO_PACE, FeatureProposer, Proposer, SessionStart
from outrider.methods import BLOCK_METHODS
from outrider.params import SamplingParams, VerificationRule

_PREFILL_BUDGET = {"cpu": 256, "cuda": 4096}
"""Prompt tokens of one round: as many as take about as long as a few drafts."""
_WARM_UP_TOKENS = 600  # at least: many tokens take other kernels than few


def build_proposer(
    methods: Sequence[MethodConfig], max_sessions: int, say: Say
) -> tuple[Proposer, str]:
    """Return the methods, warmed up, and their tokenizer's hash (empty if they have none).

    Runs on the thread that will draft: all of torch's work stays on one thread. Raises
    `ConfigError` and `UnsupportedModelError`.
    """
    built = [_BUILDERS[type(method)](method, max_sessions, say) for method in methods]
    tokenizer_hash = next((hash_ for _, hash_ in built if hash_), "")
    # The objects that loading leaves stay, so that full collections need not look at them.
    gc.collect()
    gc.freeze()
    if len(built) == 1:
        return built[0][0], tokenizer_hash
    return HybridProposer([proposer for proposer, _ in built]), tokenizer_hash


def _build_ngram(method: NgramConfig, max_sessions: int, _: Say) -> tuple[Proposer, str]:
    proposer = NgramProposer(
        prompt_lookup_min=method.prompt_lookup_min,
        prompt_lookup_max=method.prompt_lookup_max,
        **_limits(method, max_sessions),
    )
    return proposer, ""


def _build_deterministic(
    method: DeterministicConfig, max_sessions: int, _: Say
) -> tuple[Proposer, str]:
    return DeterministicProposer(**_limits(method, max_sessions)), ""


def _limits(method: MethodConfig, max_sessions: int) -> dict[str, Any]:
    return {
        "max_sessions": max_sessions,
        "max_draft_tokens": method.max_draft_tokens,
        "max_branches": method.max_branches,
    }


def _build_suffix(method: SuffixConfig, max_sessions: int, say: Say) -> tuple[Proposer, str]:
    # Imported here: the other copying methods start without Numba.
    from outrider.drafting.copying.suffix import SuffixProposer

    say("compiling, which takes half a minute the first time")
    _warm_up(SuffixProposer())  # another one, which remembers the made-up responses
    return SuffixProposer(method.settings, **_limits(method, max_sessions)), ""


def _build_draft_model(
    method: DraftModelConfig, max_sessions: int, say: Say
) -> tuple[Proposer, str]:
    # Imported here: prompt lookup starts without torch.
    from outrider.drafting.building.draft_model import build_draft_model

    began, prefill_budget = time.perf_counter(), _PREFILL_BUDGET[method.device]
    proposer, tokenizer_hash = build_draft_model(method, max_sessions, prefill_budget, say)
    say("warming up")
    _warm_up(proposer, prefill_budget)
    say(f"ready to draft after {time.perf_counter() - began:.1f} s")
    return proposer, tokenizer_hash


def _build_head(method: HeadConfig, max_sessions: int, say: Say) -> tuple[Proposer, str]:
    # Imported here: prompt lookup starts without torch.
    from outrider.drafting.building.heads import build_head

    prefill_budget = _PREFILL_BUDGET[method.device]
    proposer, tokenizer_hash = build_head(method, max_sessions, prefill_budget, say)
    say("warming up")
    _warm_up(proposer, prefill_budget)
    if method.name in BLOCK_METHODS:  # whose eager rounds take kernels of their own
        _warm_up(proposer, prefill_budget, VerificationRule.REJECTION)
    return proposer, tokenizer_hash


_BUILDERS: Final[Mapping[type[MethodConfig], Callable[[Any, int, Say], tuple[Proposer, str]]]] = {
    NgramConfig: _build_ngram,
    DeterministicConfig: _build_deterministic,
    SuffixConfig: _build_suffix,
    DraftModelConfig: _build_draft_model,
    HeadConfig: _build_head,
}
"""Each returns a warmed-up method for so many sessions, and its tokenizer's hash."""


def _warm_up(
    proposer: Proposer, prefill_budget: int = 0, rule: VerificationRule = VerificationRule.COUPLED
) -> None:
    """Draft for made-up sessions, so that the first real one does not pay for lazy set-up.

    Prompts are as long as one call takes (`prefill_budget` tokens): a device's memory is taken now.
    """
    traits = proposer.traits
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)):
        for num_sessions in (1, 2):
            keys = range(-num_sessions, 0)
            long = max(_WARM_UP_TOKENS, prefill_budget)
            prefix = [1] * min(long, traits.max_model_len // 2)
            for key in keys:
                start = SessionStart(prefix, sampling, 4, traits.max_model_len, rule=rule)
                proposer.open(key, start)
                _make_up_features(proposer, key, 0, len(prefix) - 1)
            while proposer.draft(keys).unfinished:  # the first round's path
                pass
            length = len(prefix)
            for wanted in (1, 4):  # every later round's: a chain's, and a tree's
                for key in keys:
                    _make_up_features(proposer, key, length - 1, 2)
                    proposer.commit(key, length, [1, 1], wanted)
                proposer.draft(keys)
                length += 2
            proposer.ahead(keys, NO_PACE)
            for key in keys:  # what nobody asks a draft for yet
                _make_up_features(proposer, key, length - 1, 1)
                proposer.commit(key, length, [1], 0)
            proposer.ahead(keys, NO_PACE)  # in spare time
            for key in keys:
                proposer.close(key)


def _make_up_features(proposer: Proposer, session: int, start: int, num_rows: int) -> None:
    needed = proposer.traits.features
    if needed is not None:
        cast("FeatureProposer", proposer).features(
            session, start, bytes(num_rows * needed.row_bytes)
        )
