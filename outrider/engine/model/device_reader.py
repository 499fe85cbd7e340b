"""Read safetensors files to a device with several threads, through pinned memory."""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.weight_files import COMPUTED, PREDICTION, StoredTensor, check_folder

_THREADS = 8  # one alone keeps up neither with a fast disk nor with the page cache
_CHUNK_BYTES = 16 * 2**20
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8},
}


@dataclass(frozen=True, slots=True)
class _Chunk:
    file: Path
    start: int  # in the file
    to: Tensor  # uint8 [bytes], on the device


class DeviceReader:
    """Reads a folder's weights to a device in the background, from now on.

    Memory is taken at once, on the caller's thread. Tensors that no target reads are left out, and
    all but `names` if these are given. Raises what `check_folder` raises.
    """

    def __init__(
        self, folder: Path, device: torch.device, names: Container[str] | None = None
    ) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._chunks: SimpleQueue[_Chunk] = SimpleQueue()
        # In the order of the files, so that a disk reads ahead.
        stored = sorted(
            check_folder(folder).items(), key=lambda named: (named[1].file, named[1].start)
        )
        for name, tensor in stored:
            if COMPUTED.fullmatch(name) or PREDICTION.fullmatch(name):
                continue
            if names is not None and name not in names:
                continue
            to = torch.empty(math.prod(tensor.shape), dtype=_DTYPES[tensor.dtype], device=device)
            self._tensors[name] = to.view(tensor.shape)
            for chunk in _chunks(folder, tensor, to.view(torch.uint8)):
                self._chunks.put(chunk)
        if device.type == "cuda":  # work in flight may still use memory that was freed before
            torch.cuda.current_stream(device).synchronize()
        pool = ThreadPoolExecutor(_THREADS, "weights")
        self._threads: list[Future[None]] = [pool.submit(self._work) for _ in range(_THREADS)]
        pool.shutdown(wait=False)

    def tensors(self) -> dict[str, Tensor]:
        """Wait for the tensors and hand them over. Raises `ConfigError`."""
        for thread in self._threads:
            thread.result()
        tensors, self._tensors = self._tensors, {}
        return tensors

    def _work(self) -> None:
        if self._device.type != "cuda":
            for chunk in self._left():
                _read(chunk, chunk.to)
            return
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            buffers = [
                (pinned_buffer(), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
            with torch.cuda.stream(stream):
                for chunk, (buffer, copied) in zip(self._left(), cycle(buffers), strict=False):
                    copied.synchronize()
                    host = buffer[: len(chunk.to)]
                    _read(chunk, host)
                    chunk.to.copy_(host, non_blocking=True)
                    copied.record(stream)
            stream.synchronize()

    def _left(self) -> Iterator[_Chunk]:
        while True:
            try:
                yield self._chunks.get_nowait()
            except Empty:
                return


def pinned_buffer() -> Tensor:
    """Return memory of the host that a device reads by itself. Raises `ConfigError`."""
    try:
        return torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        needed = 2 * _THREADS * _CHUNK_BYTES // 2**20
        raise ConfigError(
            f"Loading pins {needed} MiB of the host's memory, and could not: free some, or raise "
            f"the limit of locked memory (ulimit -l). {error}"
        ) from error


def _chunks(folder: Path, tensor: StoredTensor, to: Tensor) -> Iterator[_Chunk]:
    for start in range(0, len(to), _CHUNK_BYTES):
        yield _Chunk(folder / tensor.file, tensor.start + start, to[start : start + _CHUNK_BYTES])


def _read(chunk: _Chunk, host: Tensor) -> None:
    """Fill `host`, uint8 [bytes], from the file. Raises `ConfigError`."""
    view = memoryview(host.numpy().data)
    try:
        with chunk.file.open("rb", buffering=0) as file:
            done = 0
            while done < len(view):
                count = os.preadv(file.fileno(), [view[done:]], chunk.start + done)
                if not count:
                    raise ConfigError(f"{chunk.file} became shorter: download it again.")
                done += count
    except OSError as error:
        raise ConfigError(f"{chunk.file} cannot be read: {error.strerror}.") from error
