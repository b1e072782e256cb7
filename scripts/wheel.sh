#!/usr/bin/env bash
# Builds the Python package outcore as a wheel, target/wheels/outcore-*.whl, for Linux with glibc 2.28 or later on this
# processor, and tries it (scripts/test_wheel.sh). Zig links it: it has the symbols of that glibc. PYTHON names another
# interpreter than python3. maturin, zig and auditwheel are installed into target/wheel/venv.
set -euo pipefail
cd "$(dirname "$0")/.."

glibc=28
tools=(maturin==1.16.0 ziglang==0.17.1 auditwheel==6.8.2)
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
venv=$target/wheel/venv
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { echo "wheel: $*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is no Python of 3.11 or later: name one by PYTHON"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "no virtual environment could be made in $venv"
"$venv/bin/python" -m pip install --quiet --only-binary :all: "${tools[@]}" ||
    fail "${tools[*]} could not be had; is the package index reachable?"
# maturin finds zig by its interpreter.
export PATH=$venv/bin:$PATH
# Refuses platforms on which outcore does not run. What Python would write there would be a change of the sources.
PYTHONPATH=runtime/python python -B -c 'import backend'

# It is stripped: line tables would be compiled only to be thrown away.
export CARGO_PROFILE_RELEASE_DEBUG=0
rm -rf "$target/wheels"
maturin build --manifest-path runtime/python/Cargo.toml --release --locked --zig --compatibility "manylinux_2_$glibc" \
    --interpreter python --out "$target/wheels"
wheel=$(echo "$target"/wheels/outcore-*.whl)
auditwheel show "$wheel" | tee "$target/wheels/audit.txt"
# It names the oldest glibc that has all symbols.
found=$(sed -nE '/consistent/,$s/.*"manylinux_2_([0-9]+)_[a-z0-9_]+".*/\1/p' "$target/wheels/audit.txt" | head -n1)
[ -n "$found" ] && [ "$found" -le "$glibc" ] || fail "auditwheel finds no glibc of 2.$glibc or older for $wheel"
PYTHON=$python scripts/test_wheel.sh "$wheel" "$glibc"
echo "wheel: $wheel, $(($(stat -c %s "$wheel") / 1024)) KiB"
