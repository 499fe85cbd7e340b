"""What alerts and the autoscalers' rules say of recorded series, by a real promtool."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kubernetes import helm

PROMTOOL = shutil.which("promtool", path=f"{helm.TOOLS}:{os.environ['PATH']}")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="k8s/tools.sh found no promtool")
DASHBOARDS = helm.ROOT / "k8s/dashboards"
SETS = (
    "monitoring.serviceMonitor.enabled=true",
    "gateway.autoscaling.enabled=true",
    "scorer.autoscaling.enabled=true",
    "proposers.draft.autoscaling.enabled=true",
)
SCORER = 'namespace="llm",job="outrider-scorer"'
GATEWAY = 'namespace="llm",job="outrider-gateway"'
POOL = 'namespace="llm",job="outrider-proposer-draft"'


def promtool(*args: str | Path) -> None:
    command = [str(PROMTOOL), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_else_do_not() -> None:
    promtool("check", "config", DASHBOARDS / "prometheus.yaml")  # and the rules that it names
    promtool("test", "rules", DASHBOARDS / "alerts_test.yaml")


def series(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": numbers} for name, numbers in values.items()]


def work(utilisation: float, late: int, rounds: int) -> list[dict[str, str]]:
    """A pool's series, per minute; `late` of `rounds` have no draft in time."""
    counted = f'outrider:pool_rounds_total{{{SCORER},pool="draft",fate='
    return series(
        {
            f'{counted}"hit"}}': f"0+{rounds - late}x30",
            f'{counted}"late"}}': f"0+{late}x30",
            f"outrider:proposer_cycle_seconds_sum{{{POOL}}}": f"0+{60 * utilisation}x30",
        }
    )


CASES: dict[str, tuple[list[dict[str, str]], str, float | None]] = {
    "500 wait, nobody is admitted": (
        series(
            {
                f'outrider:num_requests_waiting{{{SCORER},instance="s0"}}': "500x30",
                f'outrider:num_requests_running{{{SCORER},instance="s0"}}': "0x30",
            }
        ),
        "requests",
        500,
    ),
    "held for scorers at zero": (
        series({f"outrider:gateway_requests_in_flight{{{GATEWAY}}}": "7x30"}), "open", 7,
    ),
    "no scorer is scraped": ([], "requests", None),
    "late and idle": (work(0.14, 50, 100), "work", 0.28),
    "late and busy": (work(0.5, 50, 100), "work", 1.0),
    "in time": (work(0.5, 5, 100), "work", 0.5),
    "no rounds yet": (
        series({f"outrider:proposer_cycle_seconds_sum{{{POOL}}}": "0+30x30"}), "work", 0.5,
    ),
}  # fmt: skip


def test_signals_of_autoscalers_are_what_the_load_asks_for(tmp_path: Path) -> None:
    rules = helm.only(helm.render(*SETS), "PrometheusRule", "outrider-autoscaling")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    tests: list[dict[str, Any]] = []
    for name, (given, signal, expected) in CASES.items():
        scaler = "proposer-draft" if signal == "work" else "scorer"
        expr = (
            f'outrider:autoscaling{{namespace="llm",signal="{signal}",scaler="outrider-{scaler}"}}'
        )
        samples = [] if expected is None else [{"labels": "{}", "value": expected}]
        tests.append(
            {
                "name": name,
                "interval": "1m",
                "input_series": given,
                "promql_expr_test": [
                    {
                        "expr": f"round(sum({expr}), 0.01)",
                        "eval_time": "20m",
                        "exp_samples": samples,
                    }
                ],
            }
        )
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    promtool("test", "rules", file)
