"""Compile and launch `kernels/hopper.cu` for compute capability 9.0."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.engine.cuda.compile import COMPILERS

logger = logging.getLogger(__name__)

Reads = Literal["bf16", "int8", "fp8"]
"""The numbers of a weight: bfloat16, int8, float8 (e4m3)."""

_LINE = 128  # bytes of a row in one fetch
_SHARED = 228 * 1024  # bytes of shared memory on a multiprocessor
_ALIGNED = 1024  # bytes, the alignment of blocks
_OVERHEAD = 1024 + 256  # bytes per program for the system and for barriers
_MAX_MAPS = 8192  # tensor maps in the cache
_MOST_STAGES = 12
INNER = 128  # divides the inner dimension
GROUP_ROWS = 64  # of a weight, per warpgroup
MOST_SPLITS = 8  # programs of a cluster that every device supports


@dataclass(frozen=True, slots=True)
class Variant:
    """The constants of a compiled kernel, named as in its source."""

    rows: int  # a multiple of 8
    groups: int
    resident: int
    splits: int
    gated: bool
    add: bool
    reads: Reads = "bf16"
    scale_rows: int = 0  # of a block of 128 columns with one scale; 0: a scale for each row
    rounded: bool = False  # x is float8, too

    @property
    def _widens(self) -> bool:
        """A weight of float8 meets x of float16."""
        return self.reads == "fp8" and not self.rounded

    @property
    def _stage_bytes(self) -> int:
        lines = 2 if self.reads == "int8" or self._widens else 1  # of a row of x
        return _LINE * (GROUP_ROWS * self.groups + self.rows * lines)

    @property
    def stages(self) -> int:
        room = _SHARED // self.resident - _OVERHEAD - _ALIGNED
        return min(_MOST_STAGES, room // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        sums = 4 * self.rows * (GROUP_ROWS * self.groups + 4)
        return _ALIGNED + max(self.stages * self._stage_bytes, sums)

    @property
    def threads(self) -> int:
        return 128 * self.groups

    def source(self) -> str:
        constants = {
            "ROWS": self.rows,
            "GROUPS": self.groups,
            "STAGES": self.stages,
            "RESIDENT": self.resident,
            "SPLITS": self.splits,
            "GATED": int(self.gated),
            "ADD": int(self.add),
            "INT8": int(self.reads == "int8"),
            "FLOAT8": int(self.reads == "fp8"),
            "ROUNDED": int(self.rounded),
            "SCALE_ROWS": self.scale_rows,
        }
        names = ", ".join(f"{name} = {value}" for name, value in constants.items())
        widens = f"#define WIDENS {int(self._widens)}"
        return f"{widens}\nconstexpr int {names};\n{self._multiply()}\n{_kernel_text()}"

    def _multiply(self) -> str:
        """Return `multiply`, whose wgmma names one register per sum, and sets or `adds` to it."""
        kind, columns, inner, letter = ("float", self.rows, "k16.f32.bf16.bf16", "f")
        flags = ", 1, 1, 0, 0"  # neither negated nor transposed
        if self.reads == "int8":
            kind, columns, inner, letter, flags = "int", 2 * self.rows, "k32.s32.s8.s8", "r", ""
        elif self.rounded:
            inner, flags = "k32.f32.e4m3.e4m3", ", 1, 1"  # never transposed
        count = columns // 2
        places = ", ".join(f"%{i}" for i in range(count))
        sums = ", ".join(f'"+{letter}"(sums[{i}])' for i in range(count))
        argument, left, given = "unsigned long long weight", f"%{count}", '"l"(weight)'
        last = count + 1  # the operand behind `left`
        if self._widens:
            inner, flags = "k16.f32.f16.f16", ", 1, 1, 0"
            registers = range(count, count + 4)
            argument, last = "const unsigned (&weight)[4]", count + 4
            left = f"{{{', '.join(f'%{i}' for i in registers)}}}"
            given = ", ".join(f'"r"(weight[{i}])' for i in range(4))
        return (
            f"typedef {kind} Sum;\n"
            "__device__ __forceinline__ void multiply(\n"
            f"    Sum *sums, {argument}, unsigned long long x, int adds) {{\n"
            f'  asm volatile("{{ .reg .pred p; setp.ne.s32 p, %{last + 1}, 0;"\n'
            f'      " wgmma.mma_async.sync.aligned.m64n{columns}{inner}"\n'
            f'      " {{{places}}}, {left}, %{last}, p{flags}; }}"\n'
            f'      : {sums} : {given}, "l"(x), "r"(adds));\n'
            "}\n"
        )


@cache
def _kernel_text() -> str:
    return files("outrider.engine.cuda").joinpath("kernels/hopper.cu").read_text()


@cache
def available() -> bool:
    """Return whether a small variant runs on this device, tried once."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    if importlib.util.find_spec("cuda") is None:
        return False
    try:
        where = torch.zeros(1, device="cuda").device  # there is a context then
        _function(Variant(8, 2, 1, 1, gated=False, add=False), where)
    except Exception as error:  # cuBLAS always works
        logger.warning("The Hopper GEMM kernel is not used: %s", error)
        return False
    return True


def load(variants: Iterable[Variant], device: torch.device) -> None:
    """Compile variants in parallel before requests wait for them. Raises RuntimeError."""
    wanted = set(variants)
    with ThreadPoolExecutor(COMPILERS) as pool:
        wait([pool.submit(_binary, variant.source()) for variant in wanted])
    for variant in wanted:
        _function(variant, device)


def launch(
    variant: Variant,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    units: Tensor,
    scales: Tensor,
    *,
    early: bool,
) -> None:
    """Compute `out` [rows, N] of x [rows, K] and a weight [N or 2 * N, K].

    For a weight of 8 bits x is what `split_kernel` made of it, times `units` float32 [rows]: two
    planes int8 [2, rows, K] for int8, float16 [rows, K] in its order, or float8 if `rounded`.

    K is a multiple of `INNER`, N of a tile's outputs. `early` uses programmatic dependent launch.
    """
    from cuda.bindings import driver

    rows, outputs = out.shape
    inner = weight.shape[1]
    function = _function(variant, x.device)
    maps = (
        _map(weight.data_ptr(), *weight.shape, GROUP_ROWS, weight.itemsize),
        _map(x.data_ptr(), x.numel() // inner, inner, variant.rows, x.itemsize),
    )
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (units, scales, out))
    given = (*pointers, *(ctypes.c_int(n) for n in (rows, outputs, inner)))
    places = (*(int(each.getPtr()) for each in maps), *(ctypes.addressof(each) for each in given))
    config = _config(variant, len(weight) // (GROUP_ROWS * variant.groups), early)
    config.hStream = torch.cuda.current_stream().cuda_stream
    parameters = (ctypes.c_void_p * len(places))(*places)
    _checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))


@cache
def _config(variant: Variant, tiles: int, early: bool) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = tiles * variant.splits, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = variant.threads, 1, 1
    config.sharedMemBytes = variant.shared_bytes
    cluster, dependent = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = variant.splits
    cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
    kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.id = kind
    dependent.value.programmaticStreamSerializationAllowed = 1
    attributes = [cluster] * (variant.splits > 1) + [dependent] * early
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@lru_cache(maxsize=_MAX_MAPS)
def _map(address: int, rows: int, inner: int, rows_at_once: int, size: int) -> Any:
    """Return the tensor map of a matrix for TMA."""
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    bytes_, bf16 = kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8, kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    return _checked(
        driver.cuTensorMapEncodeTiled(
            bytes_ if size == 1 else bf16,
            2,
            address,
            [driver.cuuint64_t(n) for n in (inner, rows)],
            [driver.cuuint64_t(inner * size)],
            [driver.cuuint32_t(n) for n in (_LINE // size, rows_at_once)],
            [driver.cuuint32_t(1)] * 2,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
        )
    )


@cache
def _function(variant: Variant, device: torch.device) -> Any:  # noqa: ARG001 - a function is of one device
    """Load the kernel on the current device."""
    from cuda.bindings import driver

    module = _checked(driver.cuModuleLoadData(_binary(variant.source())))
    function = _checked(driver.cuModuleGetFunction(module, b"hopper_gemm_kernel"))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, most, variant.shared_bytes))
    return function


def _binary(source: str) -> bytes:
    """Compile, or read from Triton's cache."""
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    version = _checked(nvrtc.nvrtcVersion())
    kept = get_cache_manager(hashlib.sha256(f"{version}{source}".encode()).hexdigest())
    if (path := kept.get_file("hopper_gemm.cubin")) is not None:
        return Path(path).read_bytes()
    binary = compiled(source)
    kept.put(binary, "hopper_gemm.cubin")
    return binary


def compiled(source: str) -> bytes:
    """Compile CUDA C++ for compute capability 9.0. Raises RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"hopper.cu", 0, [], []))
    try:
        options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
        error, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(error):
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(log.decode())
        binary = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, binary))
        return bytes(binary)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the results behind the status of a CUDA call. Raises RuntimeError."""
    error, *rest = result
    if int(error):
        raise RuntimeError(f"CUDA: {error}")
    return rest[0] if len(rest) == 1 else tuple(rest)
