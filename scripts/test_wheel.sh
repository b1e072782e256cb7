#!/usr/bin/env bash
# Tries a wheel of the Python package as those have it who install it: test_wheel.sh WHEEL [GLIBC]
# Installs it without a network into a new virtual environment, target/wheel/try, and tests its programs there. The
# library of `outcore run`, which no auditor of wheels sees, must need no newer glibc than 2.GLIBC (28).
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=${1:?test_wheel.sh: name a wheel}
glibc=${2:-28}
python=${PYTHON:-python3}
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
try=$target/wheel/try
unset PYTHONPATH OUTCORE_PRELOAD

rm -rf "$try"
"$python" -m venv "$try"
"$try/bin/python" -m pip install --quiet --disable-pip-version-check --no-index "$wheel"
XDG_CACHE_HOME=$try/cache "$try/bin/python" -B -W error -m unittest -v runtime/python/tests/test_programs.py
"$try/bin/python" - "$glibc" "$try/cache/outcore"/preload-*.so <<'PY'
import re
import sys

most, library = int(sys.argv[1]), sys.argv[2]
needed = max(map(int, re.findall(rb"\0GLIBC_2\.(\d+)", open(library, "rb").read())))
if needed > most:
    sys.exit(f"test_wheel: the library of `outcore run` needs glibc 2.{needed}, and the wheel promises 2.{most}")
PY
echo "test_wheel: ok"
