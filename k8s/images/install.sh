#!/bin/sh
# The steps of the images, apart so that a new version of the services is a small layer:
#   install.sh dependencies gateway|cpu|cuda FOLDER   a virtual environment, as constraints.txt says
#   install.sh services gateway|cpu|cuda FOLDER       Outrider itself, for PYTHONPATH
# Run in the checkout, with uv on the PATH.
set -eu
export UV_NATIVE_TLS=1 # the machine's certificates, as pip takes them
folder=$3
install() {
  uv pip install --quiet --constraints constraints.txt "$@"
}
install_dependencies() {
  uv venv --quiet --python 3.11 "$folder"
  install --python "$folder/bin/python" "$@"
}
case "$1 $2" in
"dependencies gateway")
  install_dependencies --requirements k8s/images/gateway.txt
  ;;
"dependencies cpu")
  install_dependencies --torch-backend cpu --requirements pyproject.toml
  ;;
"dependencies cuda")
  install_dependencies --constraints k8s/images/cuda.txt --extra cuda --requirements pyproject.toml
  ;;
"services gateway")
  source=$(mktemp -d)
  cp -R pyproject.toml README.md LICENSE gateway outrider "$source"
  rm "$source"/outrider/models/data/*/*.safetensors # it reads their tokenizers only
  install --python 3.11 --no-deps --target "$folder" "$source"
  rm -r "$source"
  ;;
"services cpu" | "services cuda")
  install --python 3.11 --no-deps --target "$folder" .
  ;;
*)
  echo "install.sh: unknown step $1 $2" >&2
  exit 2
  ;;
esac
