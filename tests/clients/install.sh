#!/bin/sh
# Make the environments of `make test-clients`: clients in Python and JavaScript, lm_eval, guidellm.
#   tests/clients/install.sh FOLDER VENV
# The last two take torch and transformers from VENV, which `make` made.
set -eu
folder=$1 venv=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder/node"

"${PYTHON:-python3.11}" -m venv "$folder/python"
"$folder/python/bin/python" -m pip install --quiet --disable-pip-version-check \
  -r "$here/requirements.txt"

# $1: the environment's name, then what pip installs beside what VENV has.
beside_torch() {
  env=$folder/$1
  shift
  "${PYTHON:-python3.11}" -m venv "$env"
  site='import sysconfig; print(sysconfig.get_path("purelib"))'
  "$venv/bin/python" -c "$site" > "$("$env/bin/python" -c "$site")/outrider.pth"
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
beside_torch lm_eval -c "$here/../../constraints.txt" 'lm_eval[api]==0.4.13'
beside_torch guidellm guidellm==0.8.1

if command -v npm > /dev/null; then
  cp "$here/package.json" "$folder/node"
  npm install --prefix "$folder/node" --no-audit --no-fund --silent
else
  echo "There is no npm: the clients in JavaScript are skipped." >&2
fi
