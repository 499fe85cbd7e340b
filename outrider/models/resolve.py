"""Finds a model's files. Knows nothing of torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError
from outrider.models.download import download
from outrider.models.weight_files import check_is_folder

EMBEDDED = "embedded"
EMBEDDED_HEADS: Final = frozenset({"dspark", "eagle3", "mtp", "medusa", "mlp_speculator"})
"""Methods whose module for the embedded target ships with Outrider."""


def resolve_model(
    name: str | None,
    role: str,
    *,
    tokenizer_only: bool = False,
    weights: tuple[str, ...] = ("*.safetensors",),
) -> Path:
    """Return a model's folder: the embedded one, one on disk, or a Hugging Face download.

    None or "embedded" is the model that ships with Outrider for that role: "target", "draft", or
    one of `EMBEDDED_HEADS`. With `tokenizer_only` no weights are downloaded, else the files that
    `weights` names. Raises `ConfigError` with what to do about it.
    """
    folder = find_local(name, role)
    if folder is not None:
        check_is_folder(folder)
        return folder
    assert name is not None, "the embedded model is local"
    return download(name, () if tokenizer_only else weights)


def find_local(name: str | None, role: str) -> Path | None:
    """Return the place of a model on this machine, whatever is there; None: to be downloaded.

    Raises `ConfigError` if the embedded model is asked for and missing.
    """
    if name is None or name == EMBEDDED:
        folder = Path(str(resources.files("outrider.models"))) / "data" / role
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"The embedded {role} model is missing ({folder}): reinstall Outrider, or name "
                "a model folder or a Hugging Face id."
            )
        return folder
    folder = Path(name).expanduser()
    local = folder.exists() or name.count("/") > 1 or name.startswith((".", "~", "/"))
    return folder if local else None
