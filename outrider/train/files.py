"""Writes checkpoints, and files that are either complete or absent."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.train.head import Export

BF16_MANTISSA_BITS = 7


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield the path to write to; the file becomes `path` when it is complete.

    A crash while writing leaves an older `path` as it was. Raises `ConfigError` where the file
    cannot be written, and then leaves no part of it on a full disk.
    """
    part = path.with_suffix(".part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `ConfigError` where `path`, or a file in that folder, cannot be written."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError
        cause: BaseException = error
        while not isinstance(cause, OSError) and cause.__context__ is not None:
            cause = cause.__context__
        reason = (isinstance(cause, OSError) and cause.strerror) or cause
        raise ConfigError(f"{path} cannot be written: {reason}.") from error


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` if no file can be written in `folder`; create nothing yet."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written: {error.strerror}.") from error


def rounded(weight: Tensor, mantissa_bits: int) -> Tensor:
    """Return the nearest bf16 value with few mantissa bits; vectors keep all seven."""
    value = weight.detach().to(torch.bfloat16).contiguous()
    drop = BF16_MANTISSA_BITS - mantissa_bits
    if weight.dim() < 2 or drop == 0:
        return value
    bits = value.view(torch.int16).to(torch.int32)
    bits = (bits + (1 << (drop - 1))) & ~((1 << drop) - 1)
    return bits.to(torch.int16).view(torch.bfloat16)


@torch.no_grad()
def round_module(module: nn.Module, mantissa_bits: int) -> None:
    """Give a module the values that its checkpoint will have."""
    for weight in module.parameters():
        weight.copy_(rounded(weight, mantissa_bits))


def write_checkpoint(export: Export, folder: Path) -> None:
    """Write the tensors in bf16, and `config.json`, to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t.to(torch.bfloat16) if t.is_floating_point() else t).cpu().contiguous()
        for name, t in export.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(export.config, indent=2) + "\n")
    share(folder)


def share(folder: Path) -> None:
    """Give weights the permissions of `config.json`.

    Safetensors lets only the owner read them, and a service may run as another user.
    """
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)
