#!/usr/bin/env bash
# Creates .venv with the pinned dependencies, for `make setup`. The files name all that is needed with hashes,
# so pip resolves nothing and installs nothing that has no hash.
set -euo pipefail
python="$*"
$python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=python3.11")'
echo 'installing into .venv: a few minutes, about 2.5 GB, 6 GB with CUDA'
$python -m venv .venv
pip() { .venv/bin/python -m pip "$@"; }
install() { pip install --quiet --no-deps --require-hashes "$@"; }
pins() { sed -nE "/^($1)==/,/[^\\]$/p" constraints.txt; }

# first what installs and builds the rest
pins 'pip|setuptools' | install -r /dev/stdin
# the settings of pip choose the build of torch; with its hashes, pip would prefer the index to a folder's CPU build
rm -rf .venv/torch
pip download --quiet --no-deps --only-binary :all: --dest .venv/torch "$(pins torch | sed -n 's/ .*//; 1p')"
pins torch | install --no-index --find-links .venv/torch -r /dev/stdin
rm -r .venv/torch
install --no-build-isolation -r constraints.txt
# a torch that is not a CPU build (2.13.0+cpu) needs CUDA's packages, on Linux
if .venv/bin/python -c 'from importlib.metadata import version; exit("+cpu" in version("torch"))'; then
    install -r constraints-cuda.txt
fi
pip install --quiet --no-deps --no-build-isolation --editable .
pip check
