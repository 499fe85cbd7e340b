#!/usr/bin/env bash
# Dashboards and alerts against a real Prometheus. `make test` checks what needs none; this needs
# prometheus and promtool on the PATH (Debian: apt-get install prometheus).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
for tool in prometheus promtool; do
  command -v "$tool" >/dev/null || { echo "check.sh: $tool is not installed" >&2; exit 1; }
done
promtool check config k8s/dashboards/prometheus.yaml # and the rules
promtool test rules k8s/dashboards/alerts_test.yaml
"$python" -m pytest -q tests/k8s/test_signals.py
exec "$python" -m k8s.dashboards.live
