#!/bin/sh
# Make the environments of `make test-clients`: Python's clients, JavaScript's, and lm_eval.
#   tests/clients/install.sh FOLDER VENV
# lm_eval takes torch and transformers from VENV, which `make` made.
set -eu
folder=$1 venv=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder/node"

"${PYTHON:-python3.11}" -m venv "$folder/python"
"$folder/python/bin/python" -m pip install --quiet --disable-pip-version-check \
  -r "$here/requirements.txt"

"${PYTHON:-python3.11}" -m venv "$folder/lm_eval"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$venv/bin/python" -c "$site" > "$("$folder/lm_eval/bin/python" -c "$site")/outrider.pth"
"$folder/lm_eval/bin/python" -m pip install --quiet --disable-pip-version-check \
  -c "$here/../../constraints.txt" 'lm_eval[api]==0.4.13'

if command -v npm > /dev/null; then
  cp "$here/package.json" "$folder/node"
  npm install --prefix "$folder/node" --no-audit --no-fund --silent
else
  echo "There is no npm: the clients in JavaScript are skipped." >&2
fi
