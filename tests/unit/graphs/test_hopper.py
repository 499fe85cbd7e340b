"""The variants of the GEMM kernel for Hopper; only a device can test their results."""

import itertools
import re

import pytest
import torch

from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.gemm.hopper import Reads, Variant

_MULTIPROCESSOR = 228 * 1024  # bytes of shared memory, by compute capability 9.0
_PROGRAM = 227 * 1024  # of them, that one may have
_SYSTEM = 1024  # that it takes besides
_UNIT = 128  # in which they are handed out


@pytest.mark.parametrize(
    ("reads", "rounded", "most", "lines"),
    [("bf16", False, 160, 1), ("int8", False, 96, 2), ("fp8", False, 96, 2), ("fp8", True, 160, 1)],
)
@pytest.mark.parametrize(("groups", "resident"), [(2, 1), (2, 2), (4, 1)])
def test_variant_of_any_size_fits_shared_memory(
    groups: int, resident: int, reads: Reads, rounded: bool, most: int, lines: int
) -> None:
    for rows in range(8, most + 1, 8):
        variant = Variant(rows, groups, resident, 3, False, True, reads, 0, rounded)
        block = 128 * (64 * groups + rows * lines)
        assert variant.stages >= 2  # one in flight while the other is multiplied
        assert variant.shared_bytes >= max(variant.stages * block, rows * 4 * 64 * groups)
        taken = variant.shared_bytes + 2 * 8 * variant.stages  # barriers: full, and empty
        assert taken <= _PROGRAM
        assert resident * (-(-taken // _UNIT) * _UNIT + _SYSTEM) <= _MULTIPROCESSOR


def test_variant_source_names_every_sum() -> None:
    kinds: dict[tuple[Reads, bool], tuple[str, str]] = {
        ("bf16", False): ("16", "bf16"),
        ("int8", False): ("32", "s8"),
        ("fp8", False): ("16", "f16"),
        ("fp8", True): ("32", "e4m3"),
    }
    for rows, ((reads, rounded), kind) in itertools.product((8, 40, 96), kinds.items()):
        source = Variant(rows, 2, 1, 1, False, False, reads, 0, rounded).source()
        columns = 2 * rows if reads == "int8" else rows  # two planes
        shape = re.search(r"\.m64n(\d+)k(\d+)\.\w+\.(\w+)", source)
        assert shape is not None
        assert shape.groups() == (str(columns), *kind)
        sums = re.findall(r'"\+[fr]"\(sums\[(\d+)\]\)', source)
        assert [int(i) for i in sums] == list(range(columns // 2))
        registers = 4 if reads == "fp8" and not rounded else 1  # of its left operand
        assert f"%{columns // 2 + registers}, p" in source  # its operands come behind them


def test_variant_source_differs_by_every_field() -> None:
    first = Variant(40, 2, 1, 3, False, True)
    for other in (
        Variant(48, 2, 1, 3, False, True),
        Variant(40, 4, 1, 3, False, True),
        Variant(40, 2, 2, 3, False, True),
        Variant(40, 2, 1, 2, False, True),
        Variant(40, 2, 1, 3, True, True),
        Variant(40, 2, 1, 3, False, False),
        Variant(40, 2, 1, 3, False, True, "int8"),
        Variant(40, 2, 1, 3, False, True, "int8", 128),
        Variant(40, 2, 1, 3, False, True, "fp8"),
        Variant(40, 2, 1, 3, False, True, "fp8", 0, True),
    ):
        assert other.source() != first.source()


def test_available_with_failing_kernel_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA: no binary for this driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.empty(0))
    monkeypatch.setattr(hopper.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(hopper, "_function", fails)
    hopper.available.cache_clear()
    try:
        assert not hopper.available()
        assert not hopper.available()
        assert [record.getMessage() for record in caplog.records] == [
            "The Hopper GEMM kernel is not used: CUDA: no binary for this driver"
        ]
        monkeypatch.setattr(hopper, "_function", lambda *_: None)
        hopper.available.cache_clear()
        assert hopper.available()
    finally:
        hopper.available.cache_clear()
