"""Tables of feature_path.py: the time that a round spends on drafts, by way."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.lib import report
from benchmarks.lib.records import Run, TokenIds

NONE, IN_SCORER = "no speculation", "in the scorer"


@dataclass(frozen=True)
class Sent:
    """Hidden states that a scorer sent to its proposer."""

    num_bytes: float
    rows: float  # one per token
    seconds: float  # of the engine's thread
    steps: float  # of the engine meanwhile


@dataclass(frozen=True)
class Sample:
    """A run of one repetition."""

    run: Run
    sent: Sent
    prompt_tokens: int  # of all its requests

    def total(self, name: str) -> float:
        return sum(each.stats[name] for each in self.run.completions)

    @property
    def drafted_rounds(self) -> float:
        return self.total("rounds") - self.total("undrafted_rounds")

    def per_round(self, name: str) -> float:
        """Return the mean over the rounds with a draft."""
        return self.total(name) / self.drafted_rounds

    @property
    def drafting_ms(self) -> float:
        """Return the time per round from a commit to the draft that answers it."""
        return self.per_round("propose_ms") + self.per_round("network_ms")

    @property
    def round_ms(self) -> float:
        """Return the median time between two messages of a request."""
        gaps = [gap for each in self.run.completions for gap in each.round_gaps_s]
        return statistics.median(gaps) * 1e3

    @property
    def score_ms(self) -> float:
        """Return the time per round of the steps that verified."""
        return self.total("score_ms") / self.total("rounds")

    @property
    def texts(self) -> list[TokenIds]:
        return [each.token_ids for each in self.run.completions]


@dataclass(frozen=True)
class Samples:
    """A way and no speculation on its scorer, by repetition."""

    drafting: list[Sample]
    plain: list[Sample]


@dataclass(frozen=True)
class Spread:
    """Median and range over the repetitions."""

    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One way at one K and number of requests at once. None: not measured."""

    k: int
    at_once: int
    way: str
    tokens_per_s: Spread
    speed_up: Spread  # over no speculation, by repetition
    round_ms: Spread
    round_ratio: Spread | None  # to in the scorer, by repetition
    draft_ms: Spread | None
    way_ms: Spread | None
    drafting_ratio: Spread | None  # of draft and way, to in the scorer, by repetition
    wait_ms: Spread | None
    score_ms: Spread
    acceptance_length: float | None  # 1 + accepted tokens per round with a draft
    hit_rate: float | None  # rounds whose draft was at hand at once, of those with a draft
    bytes_per_token: float | None
    bytes_per_round: float | None  # of what was generated
    prompt_bytes: float | None  # per request
    sending_us: float | None  # of the engine's thread, per step
    equal: float  # share of texts that are those of no speculation


def rows_of(k: int, at_once: int, samples: Mapping[str, Samples]) -> list[Row]:
    """Sum up the ways, and no speculation over all of them."""
    plain = [each for way in samples.values() for each in way.plain]
    close = samples[IN_SCORER].drafting if IN_SCORER in samples else None
    rows = [_row((k, at_once, way), each, close) for way, each in samples.items()]
    return [*rows, _row((k, at_once, NONE), Samples(plain, plain), None)]


def _row(what: tuple[int, int, str], samples: Samples, close: Sequence[Sample] | None) -> Row:
    mine, plain = samples.drafting, samples.plain

    def spread(of: Callable[[Sample], float]) -> Spread:
        return Spread.of([of(each) for each in mine])

    def ratio(of: Callable[[Sample], float], to: Sequence[Sample]) -> Spread:
        return Spread.of([of(a) / of(b) for a, b in zip(mine, to, strict=True)])

    drafts = what[2] != NONE
    rounds = sum(each.drafted_rounds for each in mine)
    num_bytes, rows, seconds, steps = (
        sum(getattr(each.sent, name) for each in mine)
        for name in ("num_bytes", "rows", "seconds", "steps")
    )
    prompt_tokens = sum(each.prompt_tokens for each in mine)
    requests = sum(len(each.texts) for each in mine)
    pairs = [
        (a, b)
        for ours, theirs in zip(mine, plain, strict=True)
        for a, b in zip(ours.texts, theirs.texts, strict=True)
    ]
    per_token = num_bytes / rows if rows else 0.0
    return Row(
        *what,
        tokens_per_s=spread(lambda s: s.run.tokens_per_s),
        speed_up=ratio(lambda s: s.run.tokens_per_s, plain),
        round_ms=spread(lambda s: s.round_ms),
        round_ratio=ratio(lambda s: s.round_ms, close) if close else None,
        draft_ms=spread(lambda s: s.per_round("propose_ms")) if drafts else None,
        way_ms=spread(lambda s: s.per_round("network_ms")) if drafts else None,
        drafting_ratio=ratio(lambda s: s.drafting_ms, close) if close else None,
        wait_ms=spread(lambda s: s.per_round("wait_ms")) if drafts else None,
        score_ms=spread(lambda s: s.score_ms),
        acceptance_length=1 + sum(s.total("accepted") for s in mine) / rounds if drafts else None,
        hit_rate=sum(s.total("hits") for s in mine) / rounds if drafts else None,
        bytes_per_token=per_token if drafts else None,
        bytes_per_round=(num_bytes - prompt_tokens * per_token) / rounds if drafts else None,
        prompt_bytes=prompt_tokens * per_token / requests if drafts else None,
        sending_us=seconds * 1e6 / steps if drafts else None,
        equal=sum(a == b for a, b in pairs) / len(pairs),
    )


_TIMES = (
    *(("tok/s", "tokens_per_s", 1), ("speed-up", "speed_up", 2), ("round ms", "round_ms", 2)),
    *(("to in scorer", "round_ratio", 2), ("draft ms", "draft_ms", 2), ("way ms", "way_ms", 2)),
    *(("both to in scorer", "drafting_ratio", 2), ("wait ms", "wait_ms", 2)),
    ("score ms", "score_ms", 2),
)


def document(rows: Sequence[Row], command: str, facts: Mapping[str, object]) -> list[str]:
    """Return the report, by lines."""
    lines = report.head("Rounds with hidden states", command, facts)
    lines += [
        "Medians over the repetitions, in brackets the lowest and the highest. Ratios are taken "
        "within a repetition. benchmarks/README.md defines the columns.",
        "",
    ]
    for k, at_once in dict.fromkeys((each.k, each.at_once) for each in rows):
        here = [each for each in rows if (each.k, each.at_once) == (k, at_once)]
        lines += [f"## K = {k}, {at_once} at once", ""]
        head = ["way", *(name for name, _, _ in _TIMES)]
        body = [[r.way, *(_spread(getattr(r, key), n) for _, key, n in _TIMES)] for r in here]
        lines += [*report.table(head, body), ""]
        head = ["way", "acc. length", "hits", "B/token", "B/round", "prompt KiB"]
        head += ["sending us/step", "equal"]
        body = [
            [
                r.way,
                report.number(r.acceptance_length),
                report.share(r.hit_rate),
                report.number(r.bytes_per_token, 0),
                report.number(r.bytes_per_round, 0),
                report.number(None if r.prompt_bytes is None else r.prompt_bytes / 1024, 1),
                report.number(r.sending_us, 0),
                report.share(r.equal),
            ]
            for r in here
        ]
        lines += [*report.table(head, body), ""]
    return lines


def _spread(value: Spread | None, digits: int) -> str:
    if value is None:
        return ""
    low, high = (f"{each:.{digits}f}" for each in (value.lowest, value.highest))
    return f"{value.median:.{digits}f} ({low}-{high})"
