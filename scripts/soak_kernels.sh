#!/usr/bin/env bash
# Makes tests/soak/kernels.ptx of the source beside it, with the compiler of scripts/fetch_nvcc.sh, or with
# NVCC. The text names an old version of PTX, which it keeps to: ptxas checks that. It also names a hash of the source
# (FNV-1a), which a test compares.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
[ -n "${NVCC:-}" ] || scripts/fetch_nvcc.sh
nvcc=${NVCC:-$target/nvcc/nvidia/cu13/bin/nvcc}
ptxas=$(dirname "$nvcc")/ptxas
folder=tests/soak
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$nvcc" -ptx -arch=compute_75 -o "$scratch/kernels.ptx" "$folder/kernels.cu"
{
    echo "// Made of kernels.cu by scripts/soak_kernels.sh."
    python3 - "$folder/kernels.cu" <<'PY'
import sys

hash = 0xCBF29CE484222325
for byte in open(sys.argv[1], "rb").read():
    hash = (hash ^ byte) * 0x100000001B3 % 2**64
print(f"// Source: {hash:016x}")
PY
    sed -e '/^\/\//d' -e '/^$/d' -e 's/^\.version .*/.version 7.0/' -e 's/^\.target .*/.target sm_70/' "$scratch/kernels.ptx"
} >"$scratch/text"
for architecture in sm_75 sm_80 sm_90; do
    "$ptxas" -arch="$architecture" -o "$scratch/cubin" "$scratch/text"
done
mv "$scratch/text" "$folder/kernels.ptx"
