"""Writing checkpoints: bf16, matrices optionally rounded further so that they compress."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.train.head import Export

BF16_MANTISSA_BITS = 7


def rounded(weight: Tensor, mantissa_bits: int) -> Tensor:
    """Nearest bf16 value with few mantissa bits; vectors keep all of bf16's seven."""
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


def write(export: Export, folder: Path) -> None:
    """One folder with the tensors and `config.json`. The values are those of the module."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t.to(torch.bfloat16) if t.is_floating_point() else t).cpu().contiguous()
        for name, t in export.tensors.items()
    }
    save_file(tensors, folder / export.file_name, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(export.config, indent=2) + "\n")
    share(folder)


def share(folder: Path) -> None:
    """Give weights the permissions of `config.json`: safetensors lets only their owner read them,
    and a service may run as somebody else.
    """
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)
