"""The training loop: bounded by steps or time, resumable, over one process or several."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.train.data import Windows
from outrider.train.files import written_whole
from outrider.train.loss import STEP_DECAY, guess_loss, step_weights
from outrider.train.optimiser import Muon, schedule
from outrider.train.processes import Processes
from outrider.train.target import Target, TargetBatch

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0
_STOPPED = 2.0
"""Share of the run that is done, as it were, when it is to end before its end."""


@dataclass(frozen=True)
class TrainConfig:
    """How long and how fast. Raises `ConfigError` for values that cannot work."""

    steps: int | None = None
    seconds: float | None = None  # of training, all runs together
    unroll_steps: int = 4  # drafted tokens that a chain is trained for
    lr: float = 4e-3
    table_lr: float = 4e-3
    save_steps: int = 1000
    tokens_per_forward: int = 32768  # a step's gradient is summed over as many forwards as it takes

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise ConfigError("Give --steps or --seconds: how long to train.")

    def progress(self, step: int, spent_s: float) -> float:
        """From 0 to 1, by whichever bound is nearer."""
        by_steps = step / self.steps if self.steps is not None else 0.0
        by_time = spent_s / self.seconds if self.seconds is not None else 0.0
        return max(by_steps, by_time)


@dataclass(frozen=True)
class Progress:
    """How far training came."""

    step: int = 0
    tokens: int = 0
    spent_s: float = 0.0


class Trainer:
    """Owns the head's weights, its optimiser and `state_file` while it trains."""

    def __init__(
        self,
        head: Any,
        target: Target,
        windows: Windows,
        config: TrainConfig,
        state_file: Path,
        processes: Processes,
    ) -> None:
        self._head: Any = head
        self._target, self._windows, self._config = target, windows, config
        self._state_file, self._processes = state_file, processes
        self._optimiser = Muon(head, head.table_names, config.lr, config.table_lr)
        self._progress = Progress()
        self._stopped = False
        device = target.device
        self._loss = torch.compile(guess_loss, disable=device.type == "cpu", dynamic=False)
        self._index_draft_ids()

    def resume(self) -> None:
        """Goes on from `state_file`. Raises `ConfigError` if it is missing or another head's."""
        try:
            saved = torch.load(self._state_file, map_location=self._target.device)
        except Exception as error:  # whatever an unpickler trips over
            what = f"{self._state_file} is no saved training"
            raise ConfigError(f"--resume: {what} ({type(error).__name__}).") from error
        try:
            self._head.load_state_dict(saved["head"])
            self._index_draft_ids()
            self._optimiser.load(saved["optimiser"])
            self._progress = Progress(**saved["progress"])
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"--resume: {self._state_file} does not fit: {error}") from error

    def _index_draft_ids(self) -> None:
        """Where each of the target's tokens is among those that can be drafted."""
        device, ids = self._target.device, self._head.draft_ids
        self._ids = None if ids is None else ids.to(device)
        if self._ids is not None:
            self._place = torch.full((int(self._target.config.vocab_size),), -1, device=device)
            self._place[self._ids] = torch.arange(len(self._ids), device=device)

    def stop(self) -> None:
        """Make `run` save and return after the step that it is in. Safe in a signal handler."""
        self._stopped = True

    def run(self, on_step: Callable[[Progress], None] = lambda _: None) -> tuple[Progress, bool]:
        """Trains; how far it came, and whether that is the end. `on_step` sees every step's."""
        config, processes = self._config, self._processes
        before, begin = self._progress, time.monotonic()
        logged = begin
        while True:
            spent = before.spent_s + time.monotonic() - begin
            done = config.progress(self._progress.step, spent)
            share = processes.agree(_STOPPED if self._stopped else min(done, 1.0))
            if share >= 1:
                break
            step = self._progress.step
            token_ids = self._windows.batch(step, processes.rank, processes.world_size)
            loss, matches = self._backward(token_ids.to(self._target.device))
            processes.average_gradients(self._head)
            nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
            self._optimiser.step(schedule(share))
            tokens = self._progress.tokens + token_ids.numel() * processes.world_size
            spent = before.spent_s + time.monotonic() - begin
            self._progress = Progress(step + 1, tokens, spent)
            if self._progress.step % config.save_steps == 0:
                self.save()
            if (now := time.monotonic()) - logged > _LOG_INTERVAL_S or step == 0:
                logged = now
                rates = " ".join(f"{float(match):.3f}" for match in matches)
                logger.info(
                    f"step {step + 1} ({share:.0%}) loss {float(loss):.4f} "
                    f"matches {rates} tokens {tokens / 1e6:.1f}M time {spent:.0f} s"
                )
            on_step(self._progress)
        self.save()
        return self._progress, share < _STOPPED

    def save(self) -> None:
        """Write `state_file`; a crash while writing leaves the old one."""
        if self._processes.rank == 0:
            state = {
                "head": self._head.state_dict(),
                "optimiser": self._optimiser.state(),
                "progress": asdict(self._progress),
            }
            # Given a name, torch would not say why it could not write.
            with written_whole(self._state_file) as part, part.open("wb") as file:
                torch.save(state, file)

    def _backward(self, token_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Add a step's gradients, part by part; the mean loss, and the last part's matches."""
        rows = max(1, self._config.tokens_per_forward // (token_ids.shape[1] - 1))
        parts = torch.split(token_ids, rows)
        total = torch.zeros((), device=token_ids.device)
        matches: list[Tensor] = []
        for part in parts:
            loss, matches = self._forward(part)
            loss = loss * (len(part) / len(token_ids))
            torch.autograd.backward(loss)
            total += loss.detach()
        return total, matches

    def _forward(self, token_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The loss, and by step how often the guess is the target's first choice."""
        batch = self._target.read(token_ids, self._head.layers)
        wanted, first, known = self._wanted(batch)
        rows, length = batch.token_ids.shape[0], batch.token_ids.shape[1] - 1
        loss = torch.zeros((), device=token_ids.device)
        matches, scale = [], 0.0
        on_gpu = token_ids.device.type == "cuda"
        with torch.autocast(token_ids.device.type, torch.bfloat16, enabled=on_gpu):
            for step, logits in enumerate(self._head.unroll(batch, self._config.unroll_steps)):
                inside = step_weights(length, rows, step, token_ids.device)
                guess = logits.flatten(0, 1)
                loss = loss + STEP_DECAY**step * self._loss(guess, wanted, first, inside * known)
                scale += STEP_DECAY**step
                right = (guess.detach().argmax(-1) == first) * known * inside
                matches.append(right.sum() / inside.sum())
        return loss / scale, matches

    @torch.no_grad()
    def _wanted(self, batch: TargetBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Row p's wanted logits, their first choice, and whether that can be drafted at all."""
        logits = batch.logits[:, 1:].flatten(0, 1)
        first = logits.argmax(-1)
        if self._ids is None:
            return logits, first, torch.ones_like(first, dtype=torch.float32)
        place = self._place[first]
        return logits[:, self._ids], place.clamp(min=0), (place >= 0).float()
