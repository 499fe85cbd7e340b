"""The queries of dashboards and alerts, taken apart."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).parents[3]
DASHBOARDS = ROOT / "k8s/dashboards"
ALERTS = ROOT / "k8s/chart/outrider/files/alerts.yaml"
PANELS = ROOT / "k8s/chart/outrider/files/dashboards"
_VARIABLES = {"$__rate_interval": "5m"} | dict.fromkeys(
    ("$model", "$namespace", "$release", "$job"), ".*"
)


@dataclass(frozen=True)
class Query:
    """`where` says which panel or rule asks it."""

    where: str
    expr: str


@dataclass(frozen=True)
class Matcher:
    """One label's condition in a selector."""

    label: str
    op: promql_parser.MatchOp
    value: str

    def accepts(self, value: str) -> bool:
        op = promql_parser.MatchOp
        if self.op in (op.Re, op.NotRe):
            return (re.fullmatch(self.value, value) is not None) == (self.op == op.Re)
        return (self.value == value) == (self.op == op.Equal)


@dataclass(frozen=True)
class Selector:
    """Series that a query reads."""

    metric: str
    matchers: tuple[Matcher, ...]


def dashboard_queries() -> list[Query]:
    """Of every panel and variable, with Grafana's variables filled in."""
    found = []
    for path in sorted(PANELS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                if "expr" not in target:  # of traces
                    continue
                expr = target["expr"]
                for variable, value in _VARIABLES.items():
                    expr = expr.replace(variable, value)
                found.append(Query(f"{path.name}: {panel['title']}", expr))
    return found


def rules() -> list[dict[str, Any]]:
    """Alerts and recording rules, as they are written."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rule_queries() -> list[Query]:
    return [Query(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


def selectors(expr: str) -> list[Selector]:
    """All of an expression. Raises `ValueError` for what is not PromQL."""
    return _selectors(promql_parser.parse(expr))


def aggregations(expr: str) -> list[tuple[frozenset[str], list[Selector]]]:
    """The labels that each aggregation keeps, and what it reads."""
    found: list[tuple[frozenset[str], list[Selector]]] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.append((frozenset(node.modifier.labels), _selectors(node)))

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found


def _selectors(expr: promql_parser.Expr) -> list[Selector]:
    found = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            matchers = tuple(Matcher(m.name, m.op, m.value) for m in node.matchers.matchers)
            found.append(Selector(node.name, matchers))

    promql_parser.walk(expr, visit)
    return found
