"""Weights stored as float8 with a factor per block, as DeepSeek-V3 publishes them.

Its README_WEIGHTS: `weight` is e4m3, `weight_scale_inv` float32, one number per block (128 x 128)
that the block is *multiplied* by; blocks at the edges are cut off.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint, is_quantised
from outrider.errors import ConfigError

_SUFFIX = "_scale_inv"


class DequantisedTensors:
    """A checkpoint's tensors; those in float8 times their factors, in float32.

    Raises `ConfigError` for a quantisation of another kind.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.names = checkpoint.names
        self.folder: Path = checkpoint.folder
        self.taken: set[str] = set()
        self._block = _block_size(checkpoint)

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def tensor(self, name: str, *shape: int) -> Tensor:
        """On the host. Raises `ConfigError` unless it is there, in this shape."""
        stored = self._checkpoint.stored(name, *shape)
        self.taken.add(name)
        if not is_quantised(stored):
            return stored
        if stored.dtype is not torch.float8_e4m3fn or stored.dim() != 2 or self._block is None:
            raise ConfigError(
                f"{name} in {self.folder} is stored as {stored.dtype}, {stored.dim()}-dimensional: "
                "a head is read from floating-point weights or from float8 (e4m3) matrices with "
                "factors per block, which config.json announces as quantization_config."
            )
        rows, columns = -(-stored.shape[0] // self._block[0]), -(-stored.shape[1] // self._block[1])
        factors = self._checkpoint.stored(name + _SUFFIX, rows, columns)
        self.taken.add(name + _SUFFIX)
        return dequantise(stored, factors, self._block)


def dequantise(weight: Tensor, factors: Tensor, block: tuple[int, int]) -> Tensor:
    """Weight [m, n] and factors [m / block[0], n / block[1]], rounded up, to float32 [m, n]."""
    rows, columns = weight.shape
    per_row = factors.float().repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * per_row.repeat_interleave(block[0], 0)[:rows]


def _block_size(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Rows and columns of a block; None for a checkpoint that is not quantised."""
    config = checkpoint.group("quantization_config")
    if not config:
        return None
    block = config.get("weight_block_size")
    sizes = [n for n in block if isinstance(n, int) and n > 0] if isinstance(block, list) else []
    if config.get("quant_method") != "fp8" or len(sizes) != 2 or sizes != block:
        raise ConfigError(
            f"config.json in {checkpoint.folder}: of quantised heads those are known with "
            'quantization_config {"quant_method": "fp8", "weight_block_size": [128, 128]}.'
        )
    return sizes[0], sizes[1]
