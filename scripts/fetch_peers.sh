#!/usr/bin/env bash
# Builds what `make bench` compares with into .venv: llama.cpp, out of the source package of llama-cpp-python, and the
# programs benches/compare/llama_cpp.c and ggml_matmul.c on top of it; and fetches libCacheSim. Takes minutes; does
# nothing where all is there.
#
# PYTHON names another interpreter than python3, OUTCORE_PEERS another folder than .venv, CMAKE_ARGS options of the
# build (on a virtual machine that advertises AMX without allowing it: -DGGML_NATIVE=OFF and what there is instead).
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.3.36
libcachesim=0.3.5
python=${PYTHON:-python3}
venv=${OUTCORE_PEERS:-.venv}
peer=$venv/bin/llama-peer
source=benches/compare/llama_cpp.c
ggml_peer=$venv/bin/ggml-peer
ggml_source=benches/compare/ggml_matmul.c
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { echo "fetch_peers: $*" >&2; exit 1; }

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "$python cannot make the virtual environment $venv"
if [ "$("$venv/bin/python" -m pip show libcachesim 2>/dev/null | sed -n 's/^Version: //p')" != "$libcachesim" ]; then
    "$venv/bin/python" -m pip install "libcachesim==$libcachesim" ||
        fail "libcachesim $libcachesim could not be had; it needs the package index"
fi
if [ "$("$venv/bin/python" -m pip show llama-cpp-python 2>/dev/null | sed -n 's/^Version: //p')" != "$version" ]; then
    # Support for pictures is not needed, and would be half of the build.
    CMAKE_ARGS="-DLLAVA_BUILD=OFF ${CMAKE_ARGS:-}" "$venv/bin/python" -m pip install --no-binary llama-cpp-python "llama-cpp-python==$version" ||
        fail "llama-cpp-python $version could not be built; it needs a C++ compiler and the package index"
fi
package=$("$venv/bin/python" -c 'import importlib.util as u; print(u.find_spec("llama_cpp").submodule_search_locations[0])')
include=$(find "$venv" -name llama.h -printf '%h\n' -quit)
[ -n "$include" ] || fail "llama-cpp-python $version came without llama.h"
build() { # PROGRAM SOURCE LIBRARY...
    local program=$1 code=$2
    shift 2
    [ ! -x "$program" ] || [ "$code" -nt "$program" ] || return 0
    cc -O2 -Wall -Wextra -I "$include" -o "$program" "$code" -L "$package/lib" "$@" -lggml -lggml-base -lm \
        -Wl,-rpath,"$(realpath "$package/lib")" || fail "$code could not be built"
}
build "$peer" "$source" -lllama
build "$ggml_peer" "$ggml_source" -lggml-cpu
echo "$peer and $ggml_peer are there"
