#!/usr/bin/env bash
# Builds the CPU image by its Dockerfile and asks it for a completion, where no registry can be
# reached: as root on Debian, with buildah, mmdebstrap and curl, in 10 minutes and more, and 5 GB. The
# base image is Debian's Python instead of python:3.11-slim, torch comes from PyPI or a folder of
# wheels, $WHEELS, and chroot stands in for a container. All it makes is in a folder that goes
# again; $BASE names a tar to keep the base in.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in buildah mmdebstrap curl; do
  command -v "$tool" >/dev/null || { echo "try_image.sh: $tool is not installed" >&2; exit 1; }
done
scratch=$(mktemp -d)
base=${BASE:-$scratch/base.tar}
port=${PORT:-18080}
serving=
buildah=(buildah --root "$scratch/store" --runroot "$scratch/run" --storage-driver
  "${STORAGE_DRIVER:-overlay}")

clean() {
  if [ -n "$serving" ]; then
    pkill -TERM --session "$serving" 2>/dev/null || true
    wait "$serving" || true
  fi
  "${buildah[@]}" rm --all >/dev/null || true
  "${buildah[@]}" rmi --all --force >/dev/null || true
  rm -rf "$scratch"
}
trap clean EXIT

[ -e "$base" ] || mmdebstrap --quiet --variant=minbase \
  --include=python3,python3-pip,python3-venv,python-is-python3,ca-certificates bookworm "$base"
mkdir "$scratch/context"
ln "$base" "$scratch/context/base.tar" 2>/dev/null || cp "$base" "$scratch/context/base.tar"
cp /etc/ssl/certs/ca-certificates.crt "$scratch/context" # a proxy's, perhaps
cat >"$scratch/context/Containerfile" <<'END'
FROM scratch
ADD base.tar /
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
ENV PIP_BREAK_SYSTEM_PACKAGES=1 UV_NATIVE_TLS=1 UV_FIND_LINKS=/wheels
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
END
"${buildah[@]}" bud --isolation chroot --tag base "$scratch/context"
mkdir "$scratch/none"
sed 's/ --torch-backend cpu//' Dockerfile >"$scratch/Dockerfile"
"${buildah[@]}" bud --isolation chroot --pull-never --tag outrider:cpu --file "$scratch/Dockerfile" \
  --build-arg PYTHON=localhost/base --build-arg DEVICE=cpu \
  --volume "$(realpath "${WHEELS:-$scratch/none}"):/wheels:ro" .

container=$("${buildah[@]}" from --pull-never localhost/outrider:cpu)
read -r user entrypoint <<<"$("${buildah[@]}" inspect --format \
  '{{.OCIv1.Config.User}} {{index .OCIv1.Config.Entrypoint 0}}' "$container")"
[ "$user" = 10001:10001 ]
setsid "${buildah[@]}" run --isolation chroot "$container" -- "$entrypoint" serve embedded \
  --port "$port" --grpc-port $((port + 1)) &
serving=$!
for _ in $(seq 150); do
  curl -fs "http://127.0.0.1:$port/health" >/dev/null && break
  kill -0 "$serving"
  sleep 2
done
answer=$(curl -fsS "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
  -d '{"model": "default", "prompt": "def median(values):", "max_tokens": 16, "aux_info": true}')
echo "$answer"
python3 -c 'import json, sys
answer = json.load(sys.stdin)
assert answer["usage"]["completion_tokens"] == 16, answer
assert answer["aux_info"]["accepted"] > 0, answer' <<<"$answer"
echo "the image serves as user $user"
