#!/bin/sh
# install.sh gateway|cpu|cuda FOLDER: Outrider, with what that image needs and the versions of
# constraints.txt, into a new virtual environment. Run in the checkout, with uv on the PATH.
set -eu
folder=$2
install() {
  uv pip install --quiet --python "$folder/bin/python" --constraints constraints.txt "$@"
}
uv venv --quiet --python 3.11 "$folder"
case $1 in
gateway)
  install --requirements k8s/images/gateway.txt
  source=$(mktemp -d)
  cp -R pyproject.toml README.md LICENSE gateway outrider "$source"
  rm "$source"/outrider/models/data/*/*.safetensors # it reads their tokenizers only
  install --no-deps "$source"
  rm -r "$source"
  ;;
cpu)
  install --torch-backend cpu .
  ;;
cuda)
  install '.[cuda]'
  ;;
*)
  echo "install.sh: unknown image $1" >&2
  exit 2
  ;;
esac
