"""Let vLLM's `min_tokens` hold back the end of a text until that length, and no longer.

Its processor keeps `min_toks` (by row: the length, the output so far, the ids that end a text, and
more), and masks these ids in what it made of that when a row entered or left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Held = list[tuple[Any, dict[int, Any]]]


def held_by_texts(processors: Iterable[Any], states: Sequence[Any]) -> None:
    """Look at the outputs of all rows again, of which the processor saw placeholders."""
    for processor in _those_of_lengths(processors):
        found = [
            processor.add_request(state.sampling_params, None, state.output_token_ids)
            for state in states
        ]
        held = {row: entry for row, entry in enumerate(found) if entry is not None}
        if held != processor.min_toks:
            set_held(processor, held)


def let_bonus_end(processors: Iterable[Any], num_drafted: Sequence[int]) -> Held:
    """Let a token behind all drafts end texts that are long enough by then.

    The processor masks it as if nothing were drafted. Returns what it held; `set_held` sets that
    again for the draft tokens, which it counts.
    """
    changed = []
    for processor in _those_of_lengths(processors):
        held = dict(processor.min_toks)
        still = {row: e for row, e in held.items() if len(e[1]) + num_drafted[row] < e[0]}
        if len(still) < len(held):
            changed.append((processor, held))
            set_held(processor, still)
    return changed


def set_held(processor: Any, held: Mapping[int, Any]) -> None:
    """Let a processor hold back the ends of these rows."""
    for entry in [*held.values(), *processor.min_toks.values()][:1]:
        # One more that is long enough makes it look at the others again, and leaves.
        processor.min_toks = {**held, -1: (0, (), *entry[2:])}
        processor.update_state(None)


def _those_of_lengths(processors: Iterable[Any]) -> list[Any]:
    return [each for each in processors if hasattr(each, "min_toks")]
