#!/usr/bin/env bash
# Compiles the workspace for 64-bit ARM, and runs tests of what needs no disk and no GPU in an emulator of the
# processor: the pager, the laboratory, and the page sizes of the kernel. Needs what its first lines name:
#   rustup target add aarch64-unknown-linux-gnu
#   apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static
# The emulator passes system calls on to this machine's kernel. So this is no test of the kernel's page size.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
for needed in aarch64-linux-gnu-gcc qemu-aarch64-static; do
    command -v "$needed" >/dev/null || { echo "aarch64.sh: $needed is missing; see the head of this script" >&2; exit 1; }
done
[ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || { echo "aarch64.sh: run rustup target add $target" >&2; exit 1; }

export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"

features=outcore-cli/cuda,outcore-gpu-check/cuda,outcore-llm/cuda,outcore-train/cuda
cargo check --target "$target" --workspace --all-targets --features "$features"
cargo test --target "$target" -p outcore-pager -p outcore-lab --lib
cargo test --target "$target" -p outcore --lib -- device::kernel_pages device::tables
echo "aarch64: ok"
