"""The draft mode by size of batch and kind of texts, found by trials."""

from __future__ import annotations

from outrider.engine.policy.base import StepDone
from outrider.engine.policy.draft_mode import ALL_SIZES, SAMPLED_TEMPERATURE, DraftMode
from outrider.engine.policy.mode_trials import INTERVAL, TRIAL_STEPS, ModeTrials
from outrider.engine.policy.timing import Average, remember

MODES = (DraftMode.OFF, DraftMode.ON_DEMAND, DraftMode.AHEAD)
MANY_ROWS = 16  # begin without drafts where nothing is known of them: trials would cost much


class ModeSelector:
    """Runs trials per size of batch, by powers of two, and by whether its texts are sampled.

    The best mode depends on both. A size begins with what was better at the size before it: while
    answers end one by one, each size lasts too few steps to find out anew. A number of rows that
    goes up and down around a power of two stays one size, and so does a mean temperature between
    `SAMPLED_TEMPERATURE` and its half. A kind of texts that is new at a size begins with what was
    better with the other kind, and soon tries whether that holds.

    What a prompt takes without drafts is taken off its step. What it takes more beside drafts is
    left: it is a cost of drafting.
    """

    def __init__(self) -> None:
        self._proposers: dict[str, None] = {}  # that are known
        self._steps_since_ahead = 0  # of rows whose proposers all cannot run ahead
        self._last_step_at: float | None = None
        self._prompt_token_s = Average()  # without drafts
        self._prompts_before = 0  # tokens, in steps of prompts only since the last other step
        self._restart(ahead=True)

    def _restart(self, *, ahead: bool) -> None:
        """Forget every trial: there are other proposers, or other modes."""
        self._modes = MODES if ahead else MODES[:2]
        self._size, self._sampled = 1, False
        self.current = self._trials(1, self._modes[-1])
        self._known = {(1, False): self.current}

    @property
    def mode(self) -> DraftMode:
        """How drafts are to be made now."""
        return self.current.mode

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        """Numbers of rows, by their bit length, at which rows are not to draft now."""
        return frozenset([size for size in ALL_SIZES if not self._mode_at(size).drafts])

    def step_done(self, step: StepDone) -> None:
        """Take in a step."""
        self._note_proposers(step)
        if step.prompts_only:  # its time is that of the round which the others wait for
            self._prompts_before += step.prompt_tokens
            return
        prompt_tokens, self._prompts_before = step.prompt_tokens + self._prompts_before, 0
        before, self._last_step_at = self._last_step_at, step.at
        changed = self._change(step.num_running, step.temperature)
        if changed or not step.comparable or before is None:
            return
        seconds = step.at - before
        if prompt_tokens:
            if not self.current.step_s:
                return
            seconds -= self._price(prompt_tokens, seconds - self.current.step_s)
        self.current.observe(
            step.tokens / step.num_running,
            max(0.0, seconds),
            drafted=step.drafted / step.num_running,
            rounds=step.num_rows / step.num_running,
            answered=step.answered / step.num_running,
        )

    def _note_proposers(self, step: StepDone) -> None:
        """Begin anew with a new proposer, as drafts' costs were others', or with other modes."""
        was_ahead = bool(self._proposers) and DraftMode.AHEAD in self._modes
        self._steps_since_ahead = 0 if step.may_run_ahead else self._steps_since_ahead + 1
        ahead = step.may_run_ahead or (was_ahead and self._steps_since_ahead < INTERVAL)
        unknown = step.proposer_ids - self._proposers.keys()
        for proposer_id in unknown:
            remember(self._proposers, proposer_id, None)
        if unknown or (step.proposer_ids and ahead != was_ahead):
            self._restart(ahead=ahead)

    def _price(self, num_tokens: int, seconds: float) -> float:
        """Return what prompts take where nothing is drafted; until that is known, `seconds`."""
        if self.current.settled and not self.current.mode.drafts:
            self._prompt_token_s.add(max(0.0, seconds) / num_tokens)
        known = self._prompt_token_s
        return num_tokens * known.mean if known.count else seconds

    def _change(self, num_rows: int, temperature: float) -> bool:
        """Go on with other trials if the batch's size or kind has changed. True if it has."""
        least = 1 << self._size - 1  # rows of this size; the most are 2 * least - 1
        same_size = 3 * least <= 4 * num_rows < 10 * least
        size = self._size if same_size else num_rows.bit_length()
        sampled = temperature >= SAMPLED_TEMPERATURE / (2 if self._sampled else 1)
        if same_size and sampled is self._sampled:
            return False
        before = self.current
        if (size, sampled) not in self._known:
            incumbent = before.incumbent if same_size else self._mode_at(size)
            self._known[size, sampled] = self._trials(size, incumbent)
        self._size, self._sampled, self.current = size, sampled, self._known[size, sampled]
        if same_size:
            self.current.take_over(before)
        else:
            self.current.settle()
        return True

    def _mode_at(self, size: int) -> DraftMode:
        if abs(size - self._size) <= 1:
            return self.current.mode  # it stays the same if only a few rows come or go
        if (size, self._sampled) in self._known:
            return self._known[size, self._sampled].mode
        decided = self.current.decided or size < MANY_ROWS.bit_length()
        return self.current.incumbent if decided else DraftMode.OFF

    def _trials(self, size: int, incumbent: DraftMode) -> ModeTrials:
        """Return trials for batches of this bit length: fewer rows need more steps to compare."""
        return ModeTrials(
            max(TRIAL_STEPS, 2 * INTERVAL >> size),
            modes=self._modes,
            incumbent=incumbent,
            trial_steps=min(INTERVAL, max(TRIAL_STEPS, 8 * INTERVAL >> size)),
        )
