#!/bin/sh
# Generates the Python code of the protos into the folder $1 (the repository's root for the
# committed code). Needs grpcio-tools and mypy-protobuf in the environment of $PYTHON.
set -eu
out=$1
python=${PYTHON:-python}
cd "$(dirname "$0")/.."
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"
export PATH # protoc looks for protoc-gen-mypy_grpc there
exec "$python" -m grpc_tools.protoc -Iprotos --python_out="$out" --pyi_out="$out" \
    --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" protos/outrider/v1/*.proto
