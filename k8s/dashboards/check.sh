#!/usr/bin/env bash
# Dashboards and alerts against a real Prometheus. `make test` checks what needs no server; this
# needs prometheus and promtool, of `make k8s` or on the PATH (Debian: apt-get install prometheus).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
PATH=$PWD/.venv/k8s/bin:$PATH
for tool in prometheus promtool; do
  command -v "$tool" >/dev/null || { echo "check.sh: $tool is not installed" >&2; exit 1; }
done
"$python" -m pytest -q tests/k8s/test_signals.py
exec "$python" -m k8s.dashboards.live
