#!/usr/bin/env bash
# Makes runtime/testkit/soak/kernels.ptx of the source beside it, with the compiler of scripts/fetch_nvcc.sh, or with
# NVCC. The text names an old version of PTX, which it keeps to: ptxas checks that.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
[ -n "${NVCC:-}" ] || scripts/fetch_nvcc.sh
nvcc=${NVCC:-$target/nvcc/nvidia/cu13/bin/nvcc}
ptxas=$(dirname "$nvcc")/ptxas
folder=runtime/testkit/soak
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$nvcc" -ptx -arch=compute_75 -o "$scratch/kernels.ptx" "$folder/kernels.cu"
{
    echo "// Made of kernels.cu by scripts/soak_kernels.sh."
    sed -e '/^\/\//d' -e '/^$/d' -e 's/^\.version .*/.version 7.0/' -e 's/^\.target .*/.target sm_70/' "$scratch/kernels.ptx"
} >"$scratch/text"
for architecture in sm_75 sm_80 sm_90; do
    "$ptxas" -arch="$architecture" -o "$scratch/cubin" "$scratch/text"
done
mv "$scratch/text" "$folder/kernels.ptx"
