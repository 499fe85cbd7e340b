"""The training loop: bounded by steps or time, resumable, over one process or several."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.train.data import Windows
from outrider.train.files import written_whole
from outrider.train.head import Head
from outrider.train.optimiser import Muon, schedule
from outrider.train.processes import Processes
from outrider.train.target import Target, TargetBatch

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0
_STEP_DECAY = 0.8
"""Later drafted tokens weigh less: they count only where all before them were right."""
_STOPPED = 2.0
"""The share of the run that counts as done when the run is to end early."""


@dataclass(frozen=True)
class TrainConfig:
    """Bounds and rates of training. Raises `ConfigError` for values that cannot work."""

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
        """Return the progress from 0 to 1, by whichever bound is nearer."""
        by_steps = step / self.steps if self.steps is not None else 0.0
        by_time = spent_s / self.seconds if self.seconds is not None else 0.0
        return max(by_steps, by_time)


@dataclass(frozen=True)
class Progress:
    """Steps, tokens and time of training so far."""

    step: int = 0
    tokens: int = 0
    spent_s: float = 0.0


class Trainer:
    """Owns the head's weights, its optimiser and `state_file` while it trains."""

    def __init__(
        self,
        head: Head,
        target: Target,
        windows: Windows,
        config: TrainConfig,
        state_file: Path,
        processes: Processes,
    ) -> None:
        self._head = head
        self._target, self._windows, self._config = target, windows, config
        self._state_file, self._processes = state_file, processes
        self._optimiser = Muon(head, head.table_names, config.lr, config.table_lr)
        self._progress = Progress()
        self._stopped = False
        device = target.device
        self._loss = torch.compile(_guess_loss, disable=device.type == "cpu")

    def resume(self) -> None:
        """Go on from `state_file`. Raises `ConfigError` if it is missing or another head's."""
        try:
            saved = torch.load(self._state_file, map_location=self._target.device)
        except Exception as error:  # whatever an unpickler trips over
            what = f"{self._state_file} is no saved training"
            raise ConfigError(f"--resume: {what} ({type(error).__name__}).") from error
        try:
            self._head.load_state_dict(saved["head"])
            self._optimiser.load(saved["optimiser"])
            self._progress = Progress(**saved["progress"])
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"--resume: {self._state_file} does not fit: {error}") from error

    def stop(self) -> None:
        """Make `run` save and return after the current step. Safe in a signal handler."""
        self._stopped = True

    def run(self, on_step: Callable[[Progress], None] = lambda _: None) -> tuple[Progress, bool]:
        """Train; return the progress, and whether the run is complete."""
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
            self._head.draw = step
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
        """Add a step's gradients; return the mean loss, and the last part's matches."""
        rows = max(1, self._config.tokens_per_forward // (token_ids.shape[1] - 1))
        total = torch.zeros((), device=token_ids.device)
        matches: list[Tensor] = []
        for part in torch.split(token_ids, rows):
            loss, matches = self._forward(part)
            loss = loss * (len(part) / len(token_ids))
            torch.autograd.backward(loss)
            total += loss.detach()
        return total, matches

    def _forward(self, token_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and by step how often a guess is the target's first choice."""
        batch = self._target.read(token_ids, self._head.layers)
        whole = self._wanted(batch)
        num_rows, length = token_ids.shape[0], token_ids.shape[1] - 1
        every_row = torch.arange(length, device=token_ids.device)
        loss = torch.zeros((), device=token_ids.device)
        matches, scale = [], 0.0
        on_gpu = token_ids.device.type == "cuda"
        with torch.autocast(token_ids.device.type, torch.bfloat16, enabled=on_gpu):
            for step, logits in enumerate(self._head.unroll(batch, self._config.unroll_steps)):
                begins, of_rows = self._head.begins, whole
                inside = every_row >= step  # earlier rows have no chain
                if begins is not None:
                    rows, inside = self._head.guessing(step, length), begins + step < length
                    of_rows = tuple(each[:, rows] for each in whole)
                wanted, first, known = (each.flatten(0, 1) for each in of_rows)
                weight = inside.float().repeat(num_rows)
                guess = logits.flatten(0, 1)
                loss = loss + _STEP_DECAY**step * self._loss(guess, wanted, first, weight * known)
                scale += _STEP_DECAY**step
                right = (guess.detach().argmax(-1) == first) * known * weight
                if self._head.acceptance is not None:
                    sure = F.binary_cross_entropy_with_logits(
                        self._head.acceptance.flatten().float(), right, weight
                    )
                    loss = loss + _STEP_DECAY**step * sure
                matches.append(right.sum() / weight.sum().clamp(min=1))
        return loss / scale, matches

    @torch.no_grad()
    def _wanted(self, batch: TargetBatch) -> tuple[Tensor, ...]:
        """Return the rows' wanted logits, their first choices, and which can be drafted."""
        logits = batch.logits[:, 1:]
        first, ids = logits.argmax(-1), self._head.draft_ids
        if ids is None:
            return logits, first, torch.ones_like(first, dtype=torch.float32)
        place = torch.searchsorted(ids, first).clamp(max=len(ids) - 1)
        return logits[..., ids], place, (ids[place] == first).float()


def _guess_loss(guess: Tensor, wanted: Tensor, first: Tensor, weight: Tensor) -> Tensor:
    """Return forward KL (up to a constant), the loss of the first choice, and total variation.

    `guess` and `wanted` are logits `[n, draft vocabulary]`; `first [n]` is the target's first
    choice among them; `weight [n]` is 0 where the target's first choice is outside. Coupled
    sampling and rejection lose the total variation.
    """
    probs = wanted.float().softmax(-1)
    log_guess = guess.float().log_softmax(-1)
    cross = -(probs * log_guess).sum(-1)
    hard = -log_guess.gather(-1, first[:, None])[:, 0]
    variation = 0.5 * (probs - log_guess.exp()).abs().sum(-1)
    total = ((cross + 0.5 * hard + 0.5 * variation) * weight).sum()
    return total / weight.sum().clamp(min=1)
