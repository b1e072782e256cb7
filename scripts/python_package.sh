#!/usr/bin/env bash
# The Python package outcore, as a wheel would have it, of the extension that Cargo built in the dev profile, or with
# PROFILE=release in that:
#   python_package.sh FOLDER     puts the package into FOLDER, which PYTHONPATH may name
#   python_package.sh --find     prints an interpreter that can run its tests; exit status 77 if there is none
# PYTHON names an interpreter with numpy and safetensors; unless told, it is that of .venv (scripts/fetch_programs.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

# Where a step of tests ends that this machine cannot do.
skipped=77

if [ "${1:-}" = --find ]; then
    python=${PYTHON:-${OUTCORE_PEERS:-.venv}/bin/python}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "SKIPPED: $python is no Python of 3.11 or later: nothing imported the extension" >&2
        exit "$skipped"
    fi
    if ! "$python" -c 'import numpy, safetensors; assert tuple(map(int, safetensors.__version__.split(".")[:2])) >= (0, 8)' 2>/dev/null; then
        echo "SKIPPED: $python has no numpy and safetensors 0.8: nothing imported the extension" >&2
        exit "$skipped"
    fi
    echo "$python"
    exit
fi

package=${1:?python_package.sh: name a folder}/outcore
library=${CARGO_TARGET_DIR:-target}/${PROFILE:-debug}/lib_native.so
[ -f "$library" ] || { echo "python_package.sh: $library is not there: cargo build -p outcore-python" >&2; exit 1; }
rm -rf "$package"
mkdir -p "$package"
cp runtime/python/outcore/*.py runtime/python/outcore/*.pyi runtime/python/outcore/py.typed "$package"
cp "$library" "$package/_native.abi3.so"
