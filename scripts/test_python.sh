#!/usr/bin/env bash
# The tests of the Python package with torch, transformers and diffusers: makes a virtual environment with these in
# target/python/venv (3 to 6 GB from the package index), builds the extension, and runs all of its tests.
# PYTHON names another interpreter than python3; OUTCORE_PYTHON_VENV an environment that has all of it.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
venv=${OUTCORE_PYTHON_VENV:-$target/python/venv}
packages=(torch==2.15.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6 safetensors==0.8.0 mypy==2.4.1
    diffusers==0.42.1 pillow==13.0.0 sentencepiece==0.2.3)
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { echo "test_python: $*" >&2; exit 1; }

python=$venv/bin/python
[ -x "$python" ] || [ -n "${OUTCORE_PYTHON_VENV:-}" ] || python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is no Python of 3.11 or later: name one by PYTHON, or its environment by OUTCORE_PYTHON_VENV"
imports="torch, transformers, accelerate, numpy, safetensors, mypy, diffusers"
if ! "$venv/bin/python" -c "import $imports" 2>/dev/null; then
    # An environment that somebody named is theirs.
    [ -z "${OUTCORE_PYTHON_VENV:-}" ] || fail "$venv has not all of ${packages[*]}: install them there"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "no virtual environment could be made in $venv"
    "$venv/bin/python" -m pip install --quiet --only-binary :all: "${packages[@]}" ||
        fail "${packages[*]} could not be had; is the package index reachable?"
fi
# Strict, so that an evicted page cannot be touched: an access that no module announced is always seen.
cargo build -p outcore -p outcore-python -p outcore-preload --features outcore/strict
scripts/python_package.sh "$target/python/package"
OUTCORE_PRELOAD=$(realpath "$target")/debug/liboutcore_preload.so
export OUTCORE_PRELOAD PYTHONPATH=$target/python/package HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# What the stubs say is what the extension has.
"$venv/bin/python" -m mypy.stubtest outcore._native
"$venv/bin/python" -m unittest discover -v -s runtime/python/tests -p 'test_*.py'
echo "test-python: ok"
