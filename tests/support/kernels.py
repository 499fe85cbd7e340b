"""Helpers for tests of CUDA kernels; importing it skips a module that cannot run.

Without a GPU the Triton kernels run on Triton's interpreter:
TRITON_INTERPRET=1 pytest -m gpu -W ignore::RuntimeWarning tests/gpu
"""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

ON_GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.004}
WIDTH = 128 if ON_GPU else 16  # of a head: the interpreter is slow


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Sample from the normal distribution, equally on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, size: float = 1.0) -> None:
    """Compare up to the dtype's rounding of sums of numbers of this `size`."""
    assert actual.dtype == expected.dtype == dtype
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * size, check_stride=False)
