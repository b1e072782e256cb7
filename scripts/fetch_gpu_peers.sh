#!/usr/bin/env bash
# Builds what the second run of the GPU check compares with: llama-bench of llama.cpp for one GPU architecture, out of
# the source package that scripts/fetch_peers.sh uses, into target/gpu-peers/bin. No GPU and no driver are needed.
# Takes 40 to 60 minutes on two cores; does nothing where it is there.
#
#   fetch_gpu_peers.sh [--arch 90a-real] [--only TARGET] [--configure] [--untried]
#
#   --arch        what CMake calls the architecture; one keeps the program at some 30 MB
#   --only        this target of the build, say an object file of one kernel; nothing is installed then
#   --configure   ends before anything is compiled
#   --untried     builds it without knowing whether llama.cpp takes our models
#
# The program needs libcudart.so.13 and libcublas.so.13 where it runs, which PyTorch brings along. Here it is linked
# against a libcuda that answers no call, because the real one comes with a driver. The synthetic models of make_model
# are tried on the CPU first, by the llama.cpp that scripts/fetch_peers.sh built. It fails where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version=//p' scripts/fetch_peers.sh)
cublas=13.1.0.3 # CUDA 13.0's
python=${PYTHON:-python3}
venv=${OUTCORE_PEERS:-.venv}
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
folder=$target/gpu-peers
arch=90a-real only='' configure='' untried=''
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { echo "fetch_gpu_peers: $*" >&2; exit 1; }

while [ $# -gt 0 ]; do
    case $1 in
        --arch) arch=${2:?} && shift ;;
        --only) only=${2:?} && shift ;;
        --configure) configure=1 ;;
        --untried) untried=1 ;;
        *) fail "there is no option $1" ;;
    esac
    shift
done

stamp="llama-cpp-python $version, $arch"
if [ -x "$folder/bin/llama-bench" ] && [ "$(cat "$folder/built" 2>/dev/null)" = "$stamp" ] && [ -z "$only$configure" ]; then
    echo "$folder/bin/llama-bench is there"
    exit 0
fi
if [ -z "$only$configure$untried" ] && [ ! -x "$venv/bin/llama-peer" ]; then
    fail "$venv has no llama.cpp to try the models on before an hour of compiling; \`make peers\` builds it, and" \
        "--untried does without"
fi
scripts/fetch_nvcc.sh
mkdir -p "$folder"

# One tree that CMake takes for a toolkit: the compilers, cuBLAS with its headers, and libraries under the names that a
# linker looks for.
toolkit=$folder/toolkit
if [ "$(cat "$toolkit/packages" 2>/dev/null)" != "$cublas $(cat "$target/nvcc/packages")" ]; then
    scratch=$(mktemp -d "$folder/toolkit.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    "$python" -m pip install --quiet --no-deps --only-binary :all: --root-user-action ignore --target "$scratch/cublas" \
        "nvidia-cublas==$cublas" || fail "nvidia-cublas $cublas could not be had; is the package index reachable?"
    cp -a "$target/nvcc/nvidia/cu13/." "$scratch/cublas/nvidia/cu13/include" "$scratch/cublas/nvidia/cu13/lib" "$scratch/"
    rm -rf "$scratch/cublas"
    for name in cudart cublas cublasLt; do
        ln -sf "lib$name.so.13" "$scratch/lib/lib$name.so"
    done
    ln -s lib "$scratch/lib64"
    echo "$cublas $(cat "$target/nvcc/packages")" >"$scratch/packages"
    rm -rf "$toolkit"
    mv "$scratch" "$toolkit"
    trap - EXIT
fi

source=$folder/llama_cpp_python-$version
if [ ! -d "$source" ]; then
    scratch=$(mktemp -d "$folder/source.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    # Only this package as source: what builds it comes ready to use.
    "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python -d "$scratch" "llama-cpp-python==$version" ||
        fail "the source package of llama-cpp-python $version could not be had; it needs the package index"
    tar -xzf "$scratch"/llama_cpp_python-"$version".tar.gz -C "$scratch"
    mv "$scratch/llama_cpp_python-$version" "$source"
    rm -rf "$scratch"
    trap - EXIT
fi
if [ ! -x "$folder/tools/bin/ninja" ] || [ ! -x "$folder/tools/bin/cmake" ]; then
    "$python" -m venv "$folder/tools" && "$folder/tools/bin/python" -m pip install --quiet cmake ninja ||
        fail "cmake and ninja could not be had; they need the package index"
fi
export PATH=$folder/tools/bin:$toolkit/bin:$PATH
root=$source/vendor/llama.cpp

# A libcuda for the linker: the functions that ggml calls, by name.
stubs=$toolkit/lib/stubs
mkdir -p "$stubs"
{
    grep -rhoE '\bcu[A-Z][a-z][A-Za-z0-9]+(_v[0-9]+)?\b *\(' "$root/ggml/src/ggml-cuda" | tr -d ' (' | sort -u |
        while read -r name; do
            # The header gives some another name.
            real=$(sed -nE "s/^ *# *define +$name +($name""_v[0-9]+) *$/\1/p" "$toolkit/include/cuda.h" | tail -n 1)
            echo "int ${real:-$name}(void) { return 100; }"
        done
} >"$stubs/cuda.c"
cc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$stubs/libcuda.so" "$stubs/cuda.c"
ln -sf libcuda.so "$stubs/libcuda.so.1"

# Assertions would hold paths of this machine, and so would the places where the linker found its libraries.
build=$folder/build names="-fmacro-prefix-map=$root=llama.cpp -fmacro-prefix-map=$toolkit=cuda"
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$arch" -DGGML_CUDA_FA=OFF -DGGML_NATIVE=OFF -DLLAMA_CURL=OFF \
    -DCMAKE_CUDA_COMPILER="$toolkit/bin/nvcc" -DCUDAToolkit_ROOT="$toolkit" -DCMAKE_C_FLAGS="$names" -DCMAKE_CXX_FLAGS="$names" \
    -DCMAKE_CUDA_FLAGS="-L$toolkit/lib -Xcompiler=${names// /,}" \
    -DCMAKE_EXE_LINKER_FLAGS="-L$stubs -Wl,-rpath-link,$toolkit/lib -Wl,-rpath-link,$stubs" \
    -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
    -DCMAKE_SKIP_RPATH=ON -DLLAMA_BUILD_NUMBER=0 -DLLAMA_BUILD_COMMIT="llama-cpp-python-$version" || fail "CMake could not configure llama.cpp"
if [ -n "$configure" ]; then
    echo "configured in $build"
    exit 0
fi
if [ -n "$only" ]; then
    cmake --build "$build" --target "$only" || fail "$only could not be built"
    exit 0
fi

# The models first: an hour of compiling is lost if llama.cpp does not take them.
make_model=$target/debug/make_model
if [ -z "$untried" ]; then
    cargo build -p outcore-llm --bin make_model
    model=$folder/tried.gguf
    # The kinds that the check uses: see LARGE and SMALL in benches/gpu-check/extra.py.
    for kind in "" "--tied --dtype Q4_1"; do
        # shellcheck disable=SC2086 # several arguments, or none
        "$make_model" "$model" --layers 2 --dim 256 --heads 4 --kv-heads 2 --ffn 512 --vocab 1024 $kind >/dev/null
        "$venv/bin/python" - "$model" <<'PYTHON' || fail "llama.cpp's CPU build does not take models of make_model $kind"
import sys

import llama_cpp

model = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False)
model.eval([1, 2, 3])
PYTHON
        rm -f "$model"
    done
    echo "llama.cpp's CPU build takes the models of make_model"
else
    echo "fetch_gpu_peers: --untried: nobody has tried whether llama.cpp takes our models"
fi
cmake --build "$build" --target llama-bench || fail "llama-bench could not be built"
mkdir -p "$folder/bin"
install -s "$build/bin/llama-bench" "$folder/bin/llama-bench"
echo "$stamp" >"$folder/built"
echo "$folder/bin/llama-bench is there: $(stat -c %s "$folder/bin/llama-bench") bytes"
