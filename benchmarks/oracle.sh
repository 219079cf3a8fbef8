#!/usr/bin/env bash
# Installs this package as it was before it was rebuilt (9b30f8f, from this repository's history) into an environment of its own, to
# compare bytes, states and speed. The scripts here need today's names.
#
#     bash benchmarks/oracle.sh FOLDER
#
# Install a CPU wheel of torch first to avoid CUDA's libraries: python3.11 -m venv FOLDER && FOLDER/bin/pip install …
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
commit=9b30f8fc
folder=${1:?usage: oracle.sh FOLDER}
source_tree=$(mktemp -d)
trap 'rm -rf "$source_tree"' EXIT
git archive "$commit" | tar x -C "$source_tree"
[[ -x $folder/bin/python ]] || python3.11 -m venv "$folder"
"$folder/bin/pip" install --quiet -c "$source_tree/constraints.txt" "$source_tree[all,test]"
cd / # not the clone, which would be imported
"$folder/bin/python" -c 'import saev_store; print(saev_store.__version__, saev_store.__file__)'
