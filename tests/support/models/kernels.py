"""Helpers for tests of CUDA kernels; importing it skips a module that cannot run.

Without a GPU the Triton kernels run on Triton's interpreter:
TRITON_INTERPRET=1 pytest -m gpu -W ignore::RuntimeWarning tests/gpu
"""

import os
from typing import Any

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


def _with_exact_float8() -> None:
    """Let Triton's interpreter convert float32 to float8 (e4m3) and back as a GPU does.

    Its own conversion loses what rounding up carries into the exponent.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target == tl.float8e4nv and source == tl.float32:
            numbers = torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn)
            return numbers.view(torch.uint8).numpy().reshape(data.shape)
        if source == tl.float8e4nv:
            numbers = torch.from_numpy(np.ascontiguousarray(data)).view(torch.float8_e4m3fn)
            wide = numbers.float().numpy()
            return wide if target == tl.float32 else plain(wide, tl.float32, target, mode)
        return plain(data, source, target, mode)

    interpreter._convert_float = convert


if not ON_GPU:
    _with_exact_float8()
