"""One model over several processes: the other ranks run the calls of rank 0 on their shards.

`torchrun` starts the ranks. `transformers` shards the weights and puts the collectives into the
forward. Rank 0 broadcasts every call.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.errors import ConfigError, OutriderError, UnavailableError

if TYPE_CHECKING:
    from outrider.engine.model.paged_model import PagedModel

HEARTBEAT_S: Final = 2.0
"""Time between the leader's calls when idle, within which it notices a lost rank."""
TIMEOUT_S: Final = 120.0
"""Time to wait for a rank that hangs. A first step may have to compile its kernels."""

_INLINE: Final = 8 * 1024  # bytes of a call's first message
_LENGTH: Final = 8  # bytes of its length
_STOP, _PING = "stop", "ping"
_METHODS: Final = frozenset({"logits", "copy_pages", "move_slots", "resize"})


@dataclass(frozen=True, slots=True)
class Ranks:
    """The number of this process in its replica, set by `torchrun`."""

    rank: int
    size: int
    local_rank: int
    """The number on its machine, which is that of its CUDA device."""

    @staticmethod
    def of(environment: Mapping[str, str]) -> Ranks | None:
        """Read the variables that `torchrun` sets; None for a single process."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
        if not environment.keys() >= set(names):
            return None
        ranks = Ranks(*(int(environment[name]) for name in names[:3]))
        return None if ranks.size == 1 else ranks

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """Return this rank's device of type `name`. Raises `ConfigError` if there is none."""
        if name == "cpu":
            return torch.device("cpu")
        count = torch.cuda.device_count()
        if name != "cuda" or self.local_rank >= count:
            raise ConfigError(
                f"Rank {self.rank} asks for device {self.local_rank} of {name!r}, of which there "
                f"are {count}: give --device cuda or cpu, and --nproc-per-node at most as many."
            )
        return torch.device("cuda", self.local_rank)


class RankGroup:
    """The processes of a replica, which all create their group at the same time.

    Calls go over gloo, unencrypted and pickled, so whoever reaches the group's ports controls it.
    Raises `UnavailableError` if the ranks do not find each other within `start_timeout_s`.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        *,
        start_timeout_s: float,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.ranks = ranks
        self.device = device
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(
                "nccl" if cuda else "gloo", timeout=timedelta(seconds=start_timeout_s)
            )
            # Loading may take long. Afterwards a rank that hangs is noticed sooner.
            self._loading = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=start_timeout_s)
            )
            self._calls = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise UnavailableError(
                f"Rank {ranks.rank} of {ranks.size} did not find the others: {error}"
            ) from error
        self._lock = threading.Lock()
        self._called_at = 0.0  # on the monotonic clock; 0: never
        self._stopped = threading.Event()
        self._on_lost: Callable[[str], None] | None = None
        self._lost: str | None = None  # the reason, once a rank is lost

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers. Every rank calls this."""
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._loading)
        return int(tensor)

    def meet(self) -> None:
        """Wait for all ranks, as long as a start may take."""
        dist.barrier(group=self._loading)

    # The leader.

    def call(self, method: str, *args: object) -> None:
        """Make the other ranks call `method` of their models with the same arguments.

        Raises `UnavailableError` if a rank is lost.
        """
        assert method in _METHODS
        if not self._called_at:  # the others may have been loading until now
            threading.Thread(target=self._ping, name="heartbeat", daemon=True).start()
        try:
            self._send((method, args))
        except OutriderError as error:
            self.lost(error.message)
            raise

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost`, from any thread, when the replica cannot go on."""
        self._on_lost = on_lost
        if self._lost is not None:  # the heartbeat noticed it before
            on_lost(self._lost)

    def lost(self, reason: str) -> None:
        """Report that the ranks may no longer agree on the calls."""
        self._lost = reason
        if self._on_lost is not None and not self._stopped.is_set():
            self._on_lost(reason)

    def stop(self) -> None:
        """Let the other ranks end, except those that are lost already."""
        self._stopped.set()
        try:
            self._send((_STOP, ()))
        except OutriderError:
            return

    def _ping(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            if time.monotonic() - self._called_at > HEARTBEAT_S / 2:
                try:
                    self._send((_PING, ()))
                except OutriderError as error:
                    self.lost(error.message)
                    return

    def _send(self, message: tuple[str, tuple[object, ...]]) -> None:
        """Raise `UnavailableError` if a rank does not receive the message."""
        payload = _dumps(message)
        first = bytearray(_INLINE)
        first[:_LENGTH] = len(payload).to_bytes(_LENGTH, "little")
        first[_LENGTH : _LENGTH + len(payload)] = payload[: _INLINE - _LENGTH]
        with self._lock:
            self._called_at = time.monotonic()
            self._broadcast(torch.frombuffer(first, dtype=torch.uint8))
            if rest := bytearray(payload[_INLINE - _LENGTH :]):
                self._broadcast(torch.frombuffer(rest, dtype=torch.uint8))

    # The others.

    def follow(self, model: PagedModel) -> None:
        """Run the leader's calls until it stops.

        Raises `UnavailableError` if the leader is lost, and the model's own errors.
        """
        while True:
            method, args = _loads(self._receive(), self.device)
            if method == _STOP:
                return
            if method != _PING:
                getattr(model, method)(*args)

    def _receive(self) -> bytes:
        first = torch.empty(_INLINE, dtype=torch.uint8)
        self._broadcast(first)
        inline = first.numpy().tobytes()
        length = int.from_bytes(inline[:_LENGTH], "little")
        rest = torch.empty(max(0, length - (_INLINE - _LENGTH)), dtype=torch.uint8)
        if len(rest):
            self._broadcast(rest)
        return inline[_LENGTH : _LENGTH + length] + rest.numpy().tobytes()

    def _broadcast(self, data: Tensor) -> None:
        try:
            dist.broadcast(data, src=0, group=self._calls)
        except RuntimeError as error:
            raise self.failed("a call", error) from error

    def failed(self, what: str, error: RuntimeError) -> UnavailableError:
        """Return the error to raise for an error of a collective."""
        why = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]  # gloo's, in short
        return UnavailableError(
            f"Rank {self.ranks.rank} lost another rank of its replica in {what}: {why}."
        )


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays of the host."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.cpu().numpy() if isinstance(obj, Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._device = device

    def persistent_load(self, pid: Any) -> Tensor:
        return torch.from_numpy(pid).to(self._device)


def _dumps(message: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def _loads(data: bytes, device: torch.device) -> Any:
    return _Unpickler(data, device).load()
