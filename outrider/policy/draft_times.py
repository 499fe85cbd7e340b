"""Seconds of drafts: what they take from a commit to their arrival, alone and beside steps."""

from __future__ import annotations

from outrider.averages import OUTLIER, Average

AGEING = 64.0  # drafts: the load changes, and with it what a token takes
TOLD_APART = 4.0  # squares of differences in length: so many tell what a token takes


class Delays:
    """Delays under like circumstances, each in part by the draft's tokens.

    How large that part is shows where drafts differ in length: a block drafter takes as long for
    any. Until they do, all of the time that a proposer says it drafted for counts.
    """

    def __init__(self) -> None:
        self.whole_s = Average()
        self.drafting, self.tokens = Average(), Average()  # the share, and of how many tokens
        self._token_s = Average(AGEING)  # by which a token more makes it longer
        self._last = (0.0, 0)  # seconds and tokens

    def add(self, seconds: float, draft_s: float, num_tokens: int) -> None:
        self.whole_s.add_time(seconds)
        if not num_tokens:
            return
        # A proposer is not believed to have drafted for longer than it took.
        self.drafting.add(draft_s / seconds if draft_s < seconds else 1.0)
        self.tokens.add(num_tokens)
        (last_s, last_tokens), self._last = self._last, (seconds, num_tokens)
        if max(seconds, last_s) < OUTLIER * min(seconds, last_s):  # else one met an accident
            longer = num_tokens - last_tokens
            self._token_s.add((seconds - last_s) / longer if longer else 0.0, longer * longer)

    def mean_s(self, num_tokens: float) -> float:
        """Return the mean seconds from a commit to the arrival of so many tokens."""
        usual = self.tokens.mean
        token_s = self.drafting.mean * self.whole_s.mean / usual if usual else 0.0
        if self._token_s.weight >= TOLD_APART:
            token_s = min(token_s, max(0.0, self._token_s.mean))
        return max(0.0, self.whole_s.mean + token_s * (num_tokens - usual))

    def most_s(self, num_tokens: float) -> float:
        """Return the seconds within which most drafts of so many tokens have come."""
        usual_s = self.mean_s(num_tokens) + 4 * self.whole_s.deviation
        return usual_s if self.whole_s.weight else float("inf")


class DraftTimes:
    """The delays of one drafter's answers, from the commit to the arrival; 0 if none is known.

    A draft that is made beside a step may share the device with it, and then both take longer.
    Whether waiting pays is asked for a row that would wait instead of starting such a step. So
    drafts beside steps count only where there are no others: else rows that once went ahead would
    never wait again. But no draft takes longer alone: where those did, either is outdated, and the
    last one counts.
    """

    def __init__(self) -> None:
        self.share = Average(mean=1.0)  # of answers that hold a draft
        self._alone, self._beside = Delays(), Delays()
        self._last_at, self._latest = -1.0, self._alone

    def observe(
        self, at: float, seconds: float, draft_s: float, num_tokens: int, *, alone: bool
    ) -> None:
        """Take in an answer that came after `seconds`; `draft_s` were drafting, as is said.

        Of a batch only the first draft counts, which is its longest, and answers without a draft
        only while no draft is known. `alone`: beside no step.
        """
        if not num_tokens or self.share.mean < 1.0:  # else it stays 1
            self.share.add(num_tokens > 0)
        if at == self._last_at or (not num_tokens and self.delays.whole_s.weight):
            return
        if num_tokens:
            self._last_at = at
        self._latest = self._alone if alone else self._beside
        self._latest.add(seconds, draft_s, num_tokens)

    @property
    def delays(self) -> Delays:
        return self._alone if self._agree else self._latest

    @property
    def _agree(self) -> bool:
        alone, beside = self._alone, self._beside
        as_long = min(alone.tokens.mean, beside.tokens.mean)  # made ahead, whole trees are beside
        known = min(alone.whole_s.weight, beside.whole_s.weight) > 0.0
        return known and beside.whole_s.mean >= alone.mean_s(as_long)

    def contention_s(self, num_tokens: float) -> float:
        """Return by how much a step beside a draft makes it late; if unknown, as if both shared."""
        if not self._agree:
            return self.delays.mean_s(num_tokens) * self.delays.drafting.mean
        return max(0.0, self._beside.mean_s(num_tokens) - self._alone.mean_s(num_tokens))
