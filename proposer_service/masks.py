"""Makes what keeps drafts within a request's constraint, from a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.drafting.draft_mask import DraftMasks
from outrider.engine.constraint import ConstraintCompiler
from outrider.errors import ConfigError
from outrider.rpc.runtime import progress


def load_masks(folder: Path, vocab_size: int) -> DraftMasks | None:
    """For the tokenizer in `folder`; None, with a line that says why, if it cannot be used."""
    try:
        compiler = ConstraintCompiler.load(folder, vocab_size, _eos_token_ids(folder))
    except ConfigError as error:
        progress("proposer", f"constrained requests are drafted for without masks. {error.message}")
        return None
    return DraftMasks(compiler)


def _eos_token_ids(folder: Path) -> frozenset[int]:
    """Ids that end a text, from config.json and generation_config.json where there is one."""
    found: set[int] = set()
    for path in (folder / "config.json", folder / "generation_config.json"):
        try:
            value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)
