#!/usr/bin/env bash
# Renders the chart with each example into k8s/examples/rendered, which holds what was reviewed, or
# into folder $1, an absolute path, for the tests to compare; and the chart's README. HELM: the helm
# to use.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-$PWD/examples/rendered}
mkdir -p "$out"
for values in examples/*.yaml; do
  name=$(basename "$values" .yaml)
  "${HELM:-../.venv/k8s/bin/helm}" template outrider chart/outrider --namespace llm \
    --values "$values" >"$out/$name.yaml"
done
[ $# -gt 0 ] || ../.venv/bin/python chart_readme.py >chart/outrider/README.md
