"""Finds a model's files. Knows nothing of torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError
from outrider.models.weight_files import check_is_folder

EMBEDDED = "embedded"
EMBEDDED_HEADS: Final = frozenset({"eagle3", "mtp", "medusa", "mlp_speculator"})
"""Methods whose module for the embedded target ships with Outrider."""
TRAINING_STATE: Final = (
    "training_args.bin",
    *("optimizer*.bin", "optimizer*.pt", "scheduler*.bin", "scheduler*.pt"),
    *("sampler*.bin", "*scaler.pt", "rng_state*.pt"),
)
"""Files of trainers beside weights, with the endings of weights."""


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
    return _download(name, () if tokenizer_only else weights)


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


def _download(name: str, weights: tuple[str, ...]) -> Path:
    # Imported here: a local folder needs no network library.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = ["*.json", "*.jinja", "tokenizer.model", *weights]
    try:
        found = snapshot_download(name, allow_patterns=patterns, ignore_patterns=[*TRAINING_STATE])
        return Path(found)
    except HFValidationError as error:
        raise ConfigError(f"{name} is neither a folder nor a Hugging Face id: {error}") from error
    except HfHubHTTPError as error:
        raise ConfigError(f"Hugging Face does not give out {name}: {error}") from error
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{name} is not a folder here and cannot be downloaded ({reason}): check the name and "
            "the network, or pass a folder."
        ) from error
