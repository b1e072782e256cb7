#!/usr/bin/env bash
# Puts numpy and safetensors into .venv: programs that map files, for the tests of `outcore run`. Does nothing where
# they are there. PYTHON names another interpreter than python3, OUTCORE_PEERS another folder than .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

# Tests write complex numbers, which safetensors 0.6 refuses.
packages=("numpy>=2.2.6,<3" "safetensors>=0.8,<1")
python=${PYTHON:-python3}
venv=${OUTCORE_PEERS:-.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { echo "fetch_programs: $*" >&2; exit 1; }

if "$venv/bin/python" -c 'import numpy, safetensors; assert tuple(map(int, safetensors.__version__.split(".")[:2])) >= (0, 8)' 2>/dev/null; then
    echo "$venv has numpy and safetensors"
    exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "$python cannot make the virtual environment $venv"
"$venv/bin/python" -m pip install --quiet --only-binary :all: "${packages[@]}" ||
    fail "${packages[*]} could not be had; is the package index reachable?"
echo "$venv has numpy and safetensors now"
