#!/bin/sh
# The protos' checks: style, formatting, wire compatibility with the last release, and that the
# committed code is what the protos generate. Needs $BUF and $PYTHON; exits 1 on the first failure.
set -eu
cd "$(dirname "$0")"
root=$(cd .. && pwd)
buf=${BUF:-buf}

"$buf" lint
"$buf" format --diff --exit-code
if tag=$(git describe --tags --abbrev=0 2>/dev/null); then
    "$buf" breaking --against "$root/.git#tag=$tag,subdir=protos"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
./generate.sh "$scratch" >/dev/null
if ! diff -r --exclude=__init__.py --exclude=__pycache__ "$scratch/outrider/v1" "$root/outrider/v1"; then
    echo "outrider/v1 is not what protos/ generates: run 'make proto' and commit the result." >&2
    exit 1
fi
echo "protos: clean"
