#!/usr/bin/env bash
# Compiles the GPU's kernels for the GPUs named below, down to machine code, and fails on any warning and on any
# register that is spilled, and if the PTX that is part of programs is not that of the sources. Leaves
# target/kernels/kernels.fatbin, which `generate --device cuda --kernels` takes, and target/kernels/train.fatbin, for
# tests of outcore-train. Needs the compilers of fetch_nvcc.sh, or NVCC, and a host compiler; no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
nvcc=${NVCC:-$target/nvcc/nvidia/cu13/bin/nvcc}
out=$target/kernels

fail() { echo "check_kernels: $*" >&2; exit 1; }

[ -x "$nvcc" ] || fail "$nvcc is absent; scripts/fetch_nvcc.sh gets it"
mkdir -p "$out"
# The PTX in programs: it comes out again, if the compiler is the one that made it.
python3 scripts/kernels_ptx.py --compare

# compile SOURCE NAME [OPTION...]: into target/kernels/NAME.fatbin.
compile() {
    local source=$1 fatbin=$out/$2.fatbin log=$out/$2.log
    shift 2
    # PTX for GPUs of tomorrow, machine code for those of today.
    "$nvcc" -std=c++17 -fatbin -o "$fatbin.tmp" -Werror all-warnings \
        -Xptxas -v,--warn-on-spills,-Werror \
        -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
        -gencode arch=compute_100,code=sm_100 -gencode arch=compute_100,code=compute_100 \
        "$@" "$source" >"$log" 2>&1 || { cat "$log" >&2; fail "$source does not compile without warnings"; }
    # What ptxas says of every kernel: none may spill.
    python3 - "$log" <<'PY'
import re, sys

text = open(sys.argv[1], encoding="utf-8").read()
found = re.findall(
    r"Compiling entry function '(\w+)' for '(sm_\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill"
    r" loads.*?Used (\d+) registers",
    text,
    re.S,
)
per_gpu = {}
for name, gpu, stack, stores, loads, registers in found:
    per_gpu.setdefault(gpu, []).append((int(registers), name, int(stack), int(stores) + int(loads)))
spilled = [(gpu, name) for gpu, all in per_gpu.items() for _, name, _, spills in all if spills]
counts = {len(all) for all in per_gpu.values()}
if len(per_gpu) != 3 or len(counts) != 1 or 0 in counts:
    sys.exit(f"check_kernels: ptxas spoke of {({gpu: len(all) for gpu, all in per_gpu.items()})} kernels")
if spilled:
    sys.exit(f"check_kernels: registers are spilled: {spilled}")
for gpu, all in sorted(per_gpu.items()):
    registers, name, _, _ = max(all)
    print(f"{gpu}: {len(all)} kernels, no spills; most registers {registers} ({name})")
PY
    mv "$fatbin.tmp" "$fatbin"
    echo "$fatbin is there"
}
compile examples/llm/src/cuda/kernels.cu kernels
compile runtime/train/cuda/kernels.cu train -fmad=false
