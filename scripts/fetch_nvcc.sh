#!/usr/bin/env bash
# Puts NVIDIA's compilers (nvcc, ptxas, NVRTC) from PyPI into target/nvcc, about 190 MB. Does nothing where they are
# there. No driver and no GPU are needed. PYTHON names another interpreter than python3.
set -euo pipefail
cd "$(dirname "$0")/.."

# 13.0, because a driver may refuse the PTX of a newer NVRTC than its own CUDA version.
packages=(
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc==13.0.88
)
python=${PYTHON:-python3}
target=${CARGO_TARGET_DIR:-target}
folder=$target/nvcc

fail() { echo "fetch_nvcc: $*" >&2; exit 1; }

if [ -x "$folder/nvidia/cu13/bin/nvcc" ] && [ "$(cat "$folder/packages" 2>/dev/null)" = "${packages[*]}" ]; then
    echo "$folder is there"
    exit 0
fi
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip; install it (python3-pip) or set PYTHON"
mkdir -p "$target"
scratch=$(mktemp -d "$target/nvcc.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location --root-user-action ignore --no-deps \
    --only-binary :all: --target "$scratch" "${packages[@]}" ||
    fail "pip could not install the compilers; is the network (or the package index) reachable?"
[ -x "$scratch/nvidia/cu13/bin/nvcc" ] || fail "the packages came without nvcc"
echo "${packages[*]}" >"$scratch/packages"
rm -rf "$folder"
mv "$scratch" "$folder"
trap - EXIT
echo "$folder is there now"
