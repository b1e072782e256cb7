#!/usr/bin/env bash
# Puts OpenAI's client for Python into target/clients/venv, for the tests of serve. Does nothing where it is there.
# PYTHON names another interpreter than python3.
set -euo pipefail
cd "$(dirname "$0")/.."

version=3.57.0
python=${PYTHON:-python3}
venv=${CARGO_TARGET_DIR:-target}/clients/venv
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { echo "fetch_clients: $*" >&2; exit 1; }

if "$venv/bin/python" -c "import openai; assert openai.__version__ == '$version'" 2>/dev/null; then
    echo "$venv has openai $version"
    exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "$python cannot make the virtual environment $venv"
"$venv/bin/python" -m pip install --quiet --only-binary :all: "openai==$version" ||
    fail "openai $version could not be had; is the package index reachable?"
echo "$venv has openai $version now"
