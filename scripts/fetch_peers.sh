#!/usr/bin/env bash
# Builds what `make bench` compares with into .venv: llama.cpp, out of the source package of llama-cpp-python, the
# programs benches/compare/llama_cpp.c and ggml_matmul.c on top of it, and llama.cpp's own server, out of the same
# package; and fetches libCacheSim. Takes some ten minutes; does nothing where all is there.
#
# PYTHON names another interpreter than python3, OUTCORE_PEERS another folder than .venv, CMAKE_ARGS further options of
# both builds of llama.cpp. Both use what the processor says it has but AMX, which some virtual machines advertise and
# do not allow.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.3.36
libcachesim=0.3.5
gguf=0.19.0 # splits models for scripts/bench_shards.py
python=${PYTHON:-python3}
venv=${OUTCORE_PEERS:-.venv}
peer=$venv/bin/llama-peer
source=benches/compare/llama_cpp.c
ggml_peer=$venv/bin/ggml-peer
ggml_source=benches/compare/ggml_matmul.c
server=$venv/bin/llama-server
server_libraries=$venv/lib/llama-server
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { echo "fetch_peers: $*" >&2; exit 1; }

# Options of ggml for this processor. -march=native, its default, would bring in AMX.
cpu=
if [ "$(uname -m)" = x86_64 ]; then
    cpu=-DGGML_NATIVE=OFF
    for pair in sse4_2:SSE42 avx:AVX avx2:AVX2 avx_vnni:AVX_VNNI bmi2:BMI2 fma:FMA f16c:F16C avx512f:AVX512 \
        avx512_vbmi2:AVX512_VBMI avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16; do
        has=OFF
        ! grep -qwm1 "${pair%:*}" /proc/cpuinfo || has=ON
        cpu+=" -DGGML_${pair#*:}=$has"
    done
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "$python cannot make the virtual environment $venv"
for package in "libcachesim $libcachesim" "gguf $gguf"; do
    read -r name wanted <<<"$package"
    if [ "$("$venv/bin/python" -m pip show "$name" 2>/dev/null | sed -n 's/^Version: //p')" != "$wanted" ]; then
        "$venv/bin/python" -m pip install "$name==$wanted" ||
            fail "$name $wanted could not be had; it needs the package index"
    fi
done
if [ "$("$venv/bin/python" -m pip show llama-cpp-python 2>/dev/null | sed -n 's/^Version: //p')" != "$version" ]; then
    # Support for pictures is not needed, and would be half of the build.
    CMAKE_ARGS="-DLLAVA_BUILD=OFF $cpu ${CMAKE_ARGS:-}" "$venv/bin/python" -m pip install --no-binary llama-cpp-python "llama-cpp-python==$version" ||
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

# The source package once more, in a folder of its own, and what builds it; both go when the server is there.
build_server() {
    local work root
    work=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" EXIT
    "$venv/bin/python" -m pip download --no-deps --no-binary llama-cpp-python -d "$work" "llama-cpp-python==$version" ||
        fail "the source package of llama-cpp-python $version could not be had; it needs the package index"
    tar -xzf "$work"/llama_cpp_python-"$version".tar.gz -C "$work"
    root=$work/llama_cpp_python-$version/vendor/llama.cpp
    "$python" -m venv "$work/tools" && "$work/tools/bin/python" -m pip install -q cmake ninja ||
        fail "cmake and ninja could not be had; they need the package index"
    # With shared libraries, as llama.cpp builds it unless told otherwise: of a program that has ggml linked in,
    # `outcore run` cannot read what a mixture's router chose. Its page for browsers is not in the package, and is not
    # needed.
    # shellcheck disable=SC2016,SC2086
    PATH=$work/tools/bin:$PATH "$work/tools/bin/cmake" -S "$root" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON \
        '-DCMAKE_INSTALL_RPATH=$ORIGIN;$ORIGIN/../lib/llama-server' $cpu -DLLAMA_BUILD_SERVER=ON \
        -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_NUMBER=0 -DLLAMA_BUILD_COMMIT="llama-cpp-python-$version" ${CMAKE_ARGS:-} &&
        "$work/tools/bin/cmake" --build "$work/build" --target llama-server || fail "llama-server could not be built"
    rm -rf "$server_libraries"
    mkdir -p "$server_libraries"
    cp -P "$work"/build/bin/lib*.so* "$server_libraries"
    install "$work/build/bin/llama-server" "$server"
}
# Earlier ones had no libraries of their own.
has_libraries() { [ -e "$server_libraries/libllama.so" ]; }
case $("$server" --version 2>&1 || true) in
    *"llama-cpp-python-$version)"*) has_libraries || build_server ;;
    *) build_server ;;
esac
echo "$peer, $ggml_peer and $server are there"
