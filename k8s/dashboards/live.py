"""Run the embedded stack under load and query it with a real Prometheus.

    python -m k8s.dashboards.live

Needs `prometheus` on the PATH. Every query of every panel must return a number, every rule must
evaluate, and an exemplar must lead to a trace that a collector received. About a minute.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Final

from k8s.dashboards.__main__ import FOLDER
from k8s.dashboards.otlp import Collector, collecting

HERE: Final = Path(__file__).parent
ALERTS: Final = HERE.parent / "chart/outrider/files/alerts.yaml"
_START_S: Final = 180.0
_LOAD_S: Final = 20.0
_CLIENTS: Final = 2
_PROMPTS: Final = (
    "def fibonacci(n):",
    "The capital of France is",
    "class Stack:\n    def push(self, item):",
    "import json\n\nwith open(path) as file:",
)


def main() -> int:
    """Return the number of queries without an answer."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        collector, endpoint = stack.enter_context(collecting())
        gateway, metrics = stack.enter_context(serving(endpoint))
        prometheus = stack.enter_context(scraping(folder, metrics))
        completions = load(gateway)
        print(f"{completions} completions; {len(collector.trace_ids)} traces")
        failures = check_panels(prometheus, collector) + check_rules(prometheus)
        failures += check_exemplars(prometheus, collector)
    print(f"{failures} failures" if failures else "all queries were answered")
    return min(failures, 100)


@contextlib.contextmanager
def serving(endpoint: str) -> Iterator[tuple[str, list[str]]]:
    """Run `outrider serve`; yield the gateway's URL and the addresses of metrics."""
    command = [sys.executable, "-m", "outrider.cli", "serve", "embedded", "--port", "0"]
    command += ["--grpc-port", "0", "--draft-device", "cpu"]
    command += ["--method", "eagle3"]  # all that a method may have: it reads hidden states, too
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with running(command, env) as process:
        assert process.stdout is not None
        lines = ""
        while not (ready := re.search(r"^ready (\S+)", lines, re.MULTILINE)):
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the stack did not start:\n{lines}")
            lines += line
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield ready[1], re.findall(r"metrics of the \w+: http://(\S+)/metrics", lines)


@contextlib.contextmanager
def scraping(folder: Path, targets: list[str]) -> Iterator[str]:
    """Run a Prometheus that scrapes the targets every second; yield its URL."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "2s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "outrider", "static_configs": [{"targets": targets}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        *("prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={address}", "--enable-feature=exemplar-storage"),
    ]
    with running(command, dict(os.environ)) as process:
        assert process.stdout is not None
        threading.Thread(target=process.stdout.read, daemon=True).start()
        deadline = time.monotonic() + _START_S
        while not is_ready(f"http://{address}/-/ready"):
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("Prometheus did not start")
            time.sleep(0.2)
        yield f"http://{address}"


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a child process within the context, with its output in one pipe."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def is_ready(url: str) -> bool:
    """Return True if the URL answers."""
    with contextlib.suppress(OSError):
        urllib.request.urlopen(url, timeout=5).close()
        return True
    return False


def load(gateway: str) -> int:
    """Ask for completions for a while, some at once, and return their number."""
    end = time.monotonic() + _LOAD_S

    def client(number: int) -> int:
        done = 0
        while time.monotonic() < end:
            prompt = _PROMPTS[(number + done) % len(_PROMPTS)]
            body = {"model": "default", "prompt": prompt, "max_tokens": 48, "temperature": 0.0}
            request = urllib.request.Request(
                f"{gateway}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()
            done += 1
        return done

    with futures.ThreadPoolExecutor(_CLIENTS) as clients:
        return sum(clients.map(client, range(_CLIENTS)))


def check_panels(prometheus: str, collector: Collector) -> int:
    """Print the values of every panel, and return the number of queries without one.

    Panels of traces are answered by the traces that the collector received.
    """
    failures = 0
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                if "expr" in target:
                    expr = target["expr"].replace("$__rate_interval", "20s")
                    expr = re.sub(r"\$(model|namespace|release|job)", ".*", expr)
                    result = ask(prometheus, "query", query=expr)["result"]
                    values = [float(series["value"][1]) for series in result]
                else:
                    query = target.get("query", "")
                    found = re.fullmatch(r'{resource\.service\.name="(.*)"}', query)
                    service = found[1] if found else target["service"]
                    values = [float(len(ids)) for ids in [collector.by_service.get(service)] if ids]
                shown = ", ".join(f"{value:.4g}" for value in values[:8])
                good = any(not math.isnan(value) for value in values)
                failures += not good
                mark = "ok  " if good else "NONE"
                print(f"{mark} {path.stem:12} {panel['title'][:38]:38} {shown}")
    return failures


def check_rules(prometheus: str) -> int:
    """Print every rule's state, and return the number of rules that fail or fire."""
    failures = 0
    for group in ask(prometheus, "rules")["groups"]:
        for rule in group["rules"]:
            good = rule["health"] == "ok" and rule.get("state", "inactive") != "firing"
            failures += not good
            print(f"{'ok  ' if good else 'BAD '} {rule['name']:38} {rule.get('state', '')}")
    return failures


def check_exemplars(prometheus: str, collector: Collector) -> int:
    """Return the number of histograms whose exemplars lead to no exported trace."""
    failures = 0
    now = time.time()
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        metric = f"gen_ai_server_{name}_seconds_bucket"
        found = ask(prometheus, "query_exemplars", query=metric, start=str(now - 600), end=str(now))
        ids = {e["labels"]["trace_id"] for series in found for e in series["exemplars"]}
        good = bool(ids) and ids <= collector.trace_ids
        failures += not good
        print(f"{'ok  ' if good else 'BAD '} exemplars of {metric}: {len(ids)} traces")
    return failures


def ask(prometheus: str, path: str, **parameters: str) -> Any:
    """Return Prometheus' answer. Raises `SystemExit` for a query that it refuses."""
    url = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{parameters.get('query')}: {error.read().decode()}") from error


if __name__ == "__main__":
    sys.exit(main())
