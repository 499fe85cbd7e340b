"""A contest of the ways to draft per size of batch and kind of texts, beside newcomers' prompts.

What a prompt takes without drafts is taken off its step, and what it takes more beside drafts, here
or at the proposer, is left.
"""

from __future__ import annotations

from outrider.engine.policy.mode import TRIAL_STEPS, DraftMode
from outrider.engine.policy.mode_trials import STRETCH, ModeTrials
from outrider.engine.policy.timing import WARM, PromptTimes, StepDone

WAYS, WAYS_AHEAD = (
    (DraftMode.NONE, DraftMode.ON_DEMAND),
    (DraftMode.NONE, DraftMode.ON_DEMAND, DraftMode.AHEAD),
)
MANY = 16  # rows, which begin without drafts where nothing is known of them
LARGEST = 16  # bit length of a number of rows


class ModeSelector:
    """A contest per size of batch, by powers of two, and by whether its texts are warm.

    Which way is better depends on both, and both are known where nothing is drafted.

    A size begins with what was better at the size before it: while answers end one by one, each
    size lasts a few steps, too few to find out anew. A number of rows that goes up and down around
    a power of two stays one size, and so does a mean temperature between `WARM` and its half. A
    kind of texts that is new at a size begins with what was better with the other, and tries soon
    whether that holds.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self._ways = WAYS_AHEAD if ahead else WAYS
        self._size, self._warm = 1, False
        self.current = self._contest(1, self._ways[-1])  # of the present size and kind
        self._known = {(1, False): self.current}
        self._last_step_at: float | None = None
        self._prompts = PromptTimes()  # without drafts
        self._alone = 0  # prompt tokens since the last step that was none of prompts only

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        """Numbers of rows, by their bit length, at which rows are not to draft now."""
        return frozenset([size for size in range(1, LARGEST + 1) if not self._way_at(size).drafts])

    def step_done(self, step: StepDone) -> None:
        """A step ended."""
        if step.prompts_only:  # its time is that of the round which the others wait for
            self._alone += step.prompt_tokens
            return
        prompt_tokens, self._alone = step.prompt_tokens + self._alone, 0
        before, self._last_step_at = self._last_step_at, step.at
        changed = self._changed(step.num_running, step.temperature)
        if not changed and step.comparable and before is not None:
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
                followed=step.followed / step.num_running,
                prompts=prompt_tokens > 0,
            )

    def _price(self, num_tokens: int, seconds: float) -> float:
        """What prompts take where nothing is drafted. Until that is known, what they took now."""
        if self.current.settled and not self.current.drafting:
            self._prompts.observe(num_tokens, seconds)
        token_s = self._prompts.token_s
        return seconds if token_s is None else num_tokens * token_s

    def _changed(self, num_rows: int, temperature: float) -> bool:
        """Whether rows became so many more or fewer, or so different, that another contest is
        theirs.
        """
        least = 1 << self._size - 1  # rows of this size; the most are 2 * least - 1
        same = 3 * least <= 4 * num_rows < 10 * least
        size = self._size if same else num_rows.bit_length()
        warm = temperature >= (WARM / 2 if self._warm else WARM)
        if same and warm is self._warm:
            return False
        before = self.current
        if (size, warm) not in self._known:
            incumbent = before.incumbent if same else self._way_at(size)
            self._known[size, warm] = self._contest(size, incumbent)
        self._size, self._warm, self.current = size, warm, self._known[size, warm]
        if same:
            self.current.take_over(before)
        else:
            self.current.settle()
        return True

    def _way_at(self, size: int) -> DraftMode:
        if abs(size - self._size) <= 1:
            return self.current.way  # it stays the same if only a few rows come or go
        if (size, self._warm) in self._known:
            return self._known[size, self._warm].way
        decided = self.current.decided or size < MANY.bit_length()
        return self.current.incumbent if decided else DraftMode.NONE

    def _contest(self, size: int, incumbent: DraftMode) -> ModeTrials:
        """For batches of this bit length: the fewer rows, the more of their steps say as much."""
        return ModeTrials(
            max(TRIAL_STEPS, 2 * STRETCH >> size),
            ways=self._ways,
            incumbent=incumbent,
            trial_steps=min(STRETCH, max(TRIAL_STEPS, 8 * STRETCH >> size)),
        )
