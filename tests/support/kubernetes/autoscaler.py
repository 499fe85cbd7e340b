"""The algorithm of Kubernetes' HorizontalPodAutoscaler, as its documentation and source have it.

For each metric of type External with a target of AverageValue: desired = ceil(value / target), but
the present number while value / (target * present) is within the tolerance of 1; the largest over
the metrics; then the stabilisation windows, the policies of `behavior`, and the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PERIOD_S = 15
_TOLERANCE = 0.1
_DEFAULTS: dict[str, dict[str, Any]] = {
    "scaleUp": {
        "stabilizationWindowSeconds": 0,
        "selectPolicy": "Max",
        "policies": [
            {"type": "Pods", "value": 4, "periodSeconds": 15},
            {"type": "Percent", "value": 100, "periodSeconds": 15},
        ],
    },
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "selectPolicy": "Max",
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
    },
}


class Keda:
    """KEDA's part for one ScaledObject: to zero and back. In between its own HPA decides.

    Any trigger above 0 makes it active; inactive for `cooldownPeriod`, it goes to the minimum.
    """

    def __init__(self, spec: Mapping[str, Any], signals: Sequence[str]) -> None:
        metrics = [
            {
                "external": {
                    "metric": {"selector": {"matchLabels": {"signal": signal}}},
                    "target": {"averageValue": trigger["metadata"]["threshold"]},
                }
            }
            for signal, trigger in zip(signals, spec["triggers"], strict=True)
        ]
        hpa = spec["advanced"]["horizontalPodAutoscalerConfig"] | {
            "metrics": metrics,
            "minReplicas": max(1, spec["minReplicaCount"]),
            "maxReplicas": spec["maxReplicaCount"],
        }
        self._hpa = Autoscaler(hpa, 1)
        self._spec = spec
        self._active_at = 0.0
        self.replicas = spec["minReplicaCount"]

    def poll(self, now: float, values: Mapping[str, float | None]) -> int:
        """Take the values of the signals by name; None: there is no such series."""
        active = any(value for value in values.values())
        if active:
            self._active_at = now
        if self.replicas == 0:
            self.replicas = self._hpa.replicas = 1 if active else 0
        elif not active and now - self._active_at >= self._spec.get("cooldownPeriod", 300):
            self.replicas = self._spec["minReplicaCount"]
        else:
            self.replicas = self._hpa.sync(now, {k: v or 0 for k, v in values.items()})
        return self.replicas


@dataclass
class Autoscaler:
    """One HorizontalPodAutoscaler, by its rendered `spec`."""

    spec: Mapping[str, Any]
    replicas: int
    _wishes: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def sync(self, now: float, values: Mapping[str, float | None]) -> int:
        """Take the values of the signals by name; None: there is no such series."""
        wish = self._wish(values)
        self._wishes.append((now, wish))
        stable = self._stabilised(now)
        limited = self._limited(now, stable)
        limited = min(max(limited, self.spec["minReplicas"]), self.spec["maxReplicas"])
        if limited != self.replicas:
            self._changes.append((now, limited - self.replicas))
            self.replicas = limited
        return self.replicas

    def _wish(self, values: Mapping[str, float | None]) -> int:
        wishes = []
        missing = False
        for metric in self.spec["metrics"]:
            external = metric["external"]
            value = values[external["metric"]["selector"]["matchLabels"]["signal"]]
            if value is None:
                missing = True
                continue
            target = float(external["target"]["averageValue"])
            ratio = value / (target * self.replicas)
            near = abs(ratio - 1) <= _TOLERANCE
            wishes.append(self.replicas if near else math.ceil(value / target))
        wish = max(wishes, default=self.replicas)
        # What cannot be read may bring pods, by the other metrics, but takes none away.
        return max(wish, self.replicas) if missing else wish

    def _rules(self, way: str) -> dict[str, Any]:
        return _DEFAULTS[way] | self.spec.get("behavior", {}).get(way, {})

    def _stabilised(self, now: float) -> int:
        def within(way: str) -> list[int]:
            window = self._rules(way)["stabilizationWindowSeconds"]
            return [wish for at, wish in self._wishes if at > now - window] or [self._wishes[-1][1]]

        low, high = min(within("scaleUp")), max(within("scaleDown"))
        return low if self.replicas < low else high if self.replicas > high else self.replicas

    def _limited(self, now: float, wish: int) -> int:
        if wish == self.replicas:
            return wish
        up = wish > self.replicas
        rules = self._rules("scaleUp" if up else "scaleDown")
        if rules["selectPolicy"] == "Disabled":
            return self.replicas
        limits = []
        for policy in rules["policies"]:
            since = now - policy["periodSeconds"]
            changed = sum(by for at, by in self._changes if at > since and (by > 0) == up)
            begun = self.replicas - changed  # replicas at the start of the policy's period
            if policy["type"] == "Pods":
                limits.append(begun + policy["value"] * (1 if up else -1))
            elif up:
                limits.append(math.ceil(begun * (1 + policy["value"] / 100)))
            else:
                limits.append(math.floor(begun * (1 - policy["value"] / 100)))
        most = rules["selectPolicy"] == "Max"
        if up:
            return min(wish, max(limits) if most else min(limits))
        return max(wish, min(limits) if most else max(limits))
