"""Write the dashboards into the chart, as `make dashboards` does."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from k8s.dashboards.capacity import capacity
from k8s.dashboards.latency import latency
from k8s.dashboards.speculation import speculation


def rendered() -> dict[str, str]:
    """Return the contents of the dashboards by file name."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {
        f"{make.__name__}.json": encoder.encode(make().build()) + "\n"
        for make in (speculation, latency, capacity)
    }


FOLDER = Path(__file__).parents[1] / "chart/outrider/files/dashboards"


if __name__ == "__main__":
    for name, text in rendered().items():
        (FOLDER / name).write_text(text)
