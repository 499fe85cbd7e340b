"""Downloads a model's files from a Hugging Face hub, which is not trusted beyond them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError, one_line

TRAINING_STATE: Final = (
    "training_args.bin",
    *("optimizer*.bin", "optimizer*.pt", "scheduler*.bin", "scheduler*.pt"),
    *("sampler*.bin", "*scaler.pt", "rng_state*.pt"),
)
"""Files of trainers beside weights, with the endings of weights."""
_UNREAD: Final = ("*/*", "consolidated*.safetensors", *TRAINING_STATE)
"""Files that no service reads: other formats lie in folders, or repeat the weights."""
_LATER: Final = (408, 429)  # HTTP: the client was too slow, or asks too much
_QUERY: Final = re.compile(r"(https?://[^\s?#]+)[?#]\S*")  # may hold a signature


class DownloadError(ConfigError):
    """A model cannot be downloaded. `may_pass`: perhaps later."""

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def download(name: str, weights: tuple[str, ...]) -> Path:
    """Return the folder of a model's files, of its weights those that `weights` names.

    Raises `DownloadError` with what to do about it.
    """
    # Imported here: a local folder needs no network library.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = ["*.json", "*.jinja", "tokenizer.model", *weights]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=[*_UNREAD]))
    except HFValidationError as error:
        raise DownloadError(
            f"{name} is neither a folder nor a Hugging Face id: {_said(error)}", may_pass=False
        ) from error
    except HfHubHTTPError as error:
        raise DownloadError(
            f"Hugging Face does not give out {name}: {_said(error)}", may_pass=_may_pass(error)
        ) from error
    except Exception as error:  # no network, no disk, or a hub that answers nonsense
        raise DownloadError(
            f"{name} is not a folder here and cannot be downloaded ({_said(error)}): check the "
            "name and the network, or pass a folder.",
            may_pass=_may_pass(error),
        ) from error


def _said(error: Exception) -> str:
    """Return the first line of an error, without what signs its addresses."""
    lines = str(error).strip().splitlines()
    return _QUERY.sub(r"\1", one_line(lines[0])) if lines else type(error).__name__


def _may_pass(error: BaseException | None) -> bool:
    """Return whether the failure may pass: not where the hub has answered that it refuses."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if 400 <= status < 500 and status not in _LATER:
            return False
        error = error.__cause__ or error.__context__
    return True
