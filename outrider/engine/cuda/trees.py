"""Place draft trees and walk along them in one launch each, as graphs/tree_inputs.py does."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.kernels.trees import place_nodes_kernel, walk_kernel
from outrider.engine.sampling.verify import VerifyBatch
from outrider.engine.tree_mask import TreeMask


def place_nodes(
    parents: Tensor, trees: TreeMask, cu_seqlens: Tensor, positions: Tensor, longest: int
) -> None:
    """Do as `outrider.engine.graphs.tree_inputs.place_nodes`. A CUDA graph can capture it."""
    rows, count = parents.shape
    tensors = (parents, trees.starts, cu_seqlens, positions, trees.visible)
    sizes = (parents.stride(0), longest, count, triton.next_power_of_2(count + 1))
    place_nodes_kernel[(rows,)](*tensors, *sizes, num_warps=1)


def walk_nodes(
    parents: Tensor, batch: VerifyBatch, slots: Tensor, scratch_slot: int, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Do as `outrider.engine.graphs.tree_inputs.walk_nodes`. A CUDA graph can capture it."""
    rows, count = parents.shape
    moves = torch.empty((2, rows * count), dtype=torch.int64, device=parents.device)
    source, target = moves.unbind()
    tensors = (batch.input_ids, slots, batch.cu_seqlens, batch.draft_lens, out, source, target)
    sizes = (parents.stride(0), scratch_slot, count, triton.next_power_of_2(count + 1))
    walk_kernel[(rows,)](parents, *tensors, *sizes, num_warps=1)
    return source, target
