"""The drafting methods by name. No protobuf: the command line names them before anything starts."""

from __future__ import annotations

import argparse
from typing import Final

METHODS: Final = (
    *("deterministic", "suffix", "dspark", "dflash", "peagle", "eagle3", "mtp", "eagle"),
    *("draft_model", "medusa", "mlp_speculator", "ngram"),
)
"""Methods a proposer may name in Hello; the order in which they are preferred."""

BLOCK_METHODS: Final = ("dspark", "dflash", "peagle")
"""Methods whose module guesses all tokens of a draft in one forward."""

HIDDEN_STATE_METHODS: Final = (
    *BLOCK_METHODS,
    *("eagle3", "mtp", "eagle", "medusa", "mlp_speculator"),
)
"""Those that read hidden states of the target, with a module that was trained for it."""

COPYING_METHODS: Final = frozenset({"deterministic", "ngram", "suffix"})
"""Those that need neither the vocabulary nor the tokenizer."""

SELF_LIMITING_METHODS: Final = frozenset({"deterministic", "suffix"})
"""Those that draft no more than they are sure of."""

METHOD_ALIASES: Final = {
    "inference_with_reference": "ngram",
    "deepseek_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
"""Other names that clients may use in `SpeculationParams.method` and `methods`, and flags."""


def parse_methods(text: str) -> tuple[str, ...]:
    """Parse a comma list of methods; aliases become the methods' own names.

    Raises `ArgumentTypeError`.
    """
    given = [name.strip() for name in text.split(",")]
    methods = tuple(METHOD_ALIASES.get(name, name) for name in given)
    for name in methods:
        if name not in METHODS:
            known = ", ".join((*METHODS, *METHOD_ALIASES))
            raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {known})")
    return methods
