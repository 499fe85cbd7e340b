"""`min_tokens` holds back the end of a text by its real length, drafts or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.vllm.min_tokens import held_by_texts, let_bonus_end, set_held

END = 7


class Processor:
    """Stands for vLLM's: what it masks changes only with its rows, or when one is long enough."""

    def __init__(self) -> None:
        self.min_toks: dict[int, Any] = {}
        self.masked: set[int] = set()

    @staticmethod
    def add_request(params: Any, _: Any, output: list[int]) -> Any:
        least = params.min_tokens
        return (least, output, {END}) if least and len(output) < least else None

    def update_state(self, batch_update: None) -> None:
        assert batch_update is None
        enough = [row for row, (n, output, _) in self.min_toks.items() if len(output) >= n]
        for row in enough:
            del self.min_toks[row]
        if enough:
            self.masked = set(self.min_toks)


def state(least: int | None, length: int) -> Any:
    params = SimpleNamespace(min_tokens=least)
    return SimpleNamespace(sampling_params=params, output_token_ids=[1] * length)


def test_rows_are_held_by_the_length_of_their_texts() -> None:
    processor, states = Processor(), [state(8, 5), state(None, 5), state(8, 8), state(4, 0)]
    processor.min_toks, processor.masked = {2: (8, [1] * 6, {END})}, {2}
    held_by_texts([object(), processor], states)
    assert processor.masked == set(processor.min_toks) == {0, 3}
    states[0].output_token_ids += [1] * 3
    states[3].output_token_ids += [1] * 4
    held_by_texts([processor], states)
    assert processor.masked == set(processor.min_toks) == set()


def test_token_behind_all_drafts_may_end_a_text_that_is_long_enough_by_then() -> None:
    processor = Processor()
    states = [state(8, 5), state(8, 4), state(8, 5)]
    held_by_texts([processor], states)
    changed = let_bonus_end([processor], [3, 3, 2])
    assert processor.masked == {1, 2}
    for each in changed:
        set_held(*each)
    assert processor.masked == set(processor.min_toks) == {0, 1, 2}
    assert let_bonus_end([processor], [0, 0, 0]) == []
