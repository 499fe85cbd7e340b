#!/bin/sh
# unpack.sh DEST: keeps this part, and unpacks every bundle of which all parts are here now.
# See benchmarks/README.md. Repeats are harmless.
set -eu
dest=${1:?usage: unpack.sh DEST}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$dest/parts"
dest=$(cd "$dest" && pwd)
cp "$here"/*.tar.gz.* "$dest/parts/"
cd "$dest/parts"
for sums in *.sums; do
    name=${sums%.tar.gz.sums}
    if cmp -s "$sums" "../$name.unpacked"; then
        echo "$name: unpacked already"
    elif ! sha256sum --check --status "$sums" 2>/dev/null; then
        echo "$name: parts are missing"
    else
        rm -rf "../$name" "../$name.unpacked"
        mkdir "../$name"
        # The sums are in the order in which the chunks belong together.
        awk '{print $2}' "$sums" | xargs cat | tar -xzf - -C "../$name"
        cp "$sums" "../$name.unpacked"
        echo "$name: unpacked"
    fi
done
cat >"$dest/env.sh" <<EOF
export PYTHONPATH=$dest/tests:$dest/attention:$dest/attention/nvidia_cutlass_dsl/dsl_packages:$dest/stack
export VLLM_PYTHONPATH=$dest/vllm
export OUTRIDER_WEIGHTS=$dest/weights
# Else each process compiles the sources that it imports, for 10 s and more.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$dest/bytecode
EOF
