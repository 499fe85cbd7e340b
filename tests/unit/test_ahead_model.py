"""The formulas give the table that the design was chosen by."""

from __future__ import annotations

import pytest

from benchmarks.ahead_model import Times, drafted_ahead, hit_share, on_demand, tokens_per_round

# acceptance, T, d, R, c; colocated, remote, drafted ahead: best K up to 12, h1 = .88, h0 = .75.
TABLE = [
    (0.8, 4.0, 0.6, 0.2, 0.3, 2.11, 1.97, 3.24),
    (0.8, 4.0, 0.6, 1.0, 1.0, 2.11, 1.65, 2.44),
    (0.8, 10.0, 0.8, 1.0, 1.0, 2.67, 2.36, 3.99),
    (0.8, 30.0, 1.0, 1.0, 1.0, 3.43, 3.27, 4.21),
]


@pytest.mark.parametrize("row", TABLE)
def test_the_table(row: tuple[float, ...]) -> None:
    a, step, draft, way, host, colocated, remote, ahead = row
    near, far = Times(step, draft, 0.0, 0.0), Times(step, draft, way, host)
    ks = range(1, 26)
    assert max(on_demand(near, k, tokens_per_round(a, k)) for k in ks) == pytest.approx(
        colocated, rel=0.03
    )
    assert max(on_demand(far, k, tokens_per_round(a, k)) for k in ks) == pytest.approx(
        remote, rel=0.03
    )
    best = max(drafted_ahead(far, k, tokens_per_round(a, k), 0.88, 0.75) for k in ks)
    assert best == pytest.approx(ahead, rel=0.06)


def test_hits_settle() -> None:
    assert hit_share(1.0, 0.3) == 1.0
    assert hit_share(0.5, 0.5) == 0.5
    share = hit_share(0.88, 0.75)
    assert share == pytest.approx(share * 0.88 + (1 - share) * 0.75)
