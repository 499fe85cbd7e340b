"""Makes what keeps drafts within a request's constraint, from a model's folder."""

from __future__ import annotations

from pathlib import Path

from outrider.drafting.building.config import Say
from outrider.drafting.masks import DraftMasks
from outrider.engine.model.loader import read_eos_token_ids
from outrider.engine.sampling.constraint import ConstraintCompiler
from outrider.errors import ConfigError


def load_masks(folder: Path, vocab_size: int, say: Say) -> DraftMasks | None:
    """For the tokenizer in `folder`; None, with a line that says why, if it cannot be used."""
    try:
        compiler = ConstraintCompiler.load(folder, vocab_size, read_eos_token_ids(folder))
    except ConfigError as error:
        say(f"constrained requests are drafted for without masks. {error.message}")
        return None
    return DraftMasks(compiler)
