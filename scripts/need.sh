#!/usr/bin/env bash
# Checks that the named tools are here: need.sh cargo python3 pip cc c++ binutils rustfmt clippy
# Prints every missing one with the way to get it, then fails.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=0
lack() {
    echo "missing: $1" >&2
    echo "    $2" >&2
    missing=1
}

# version_at_least HAVE WANT
version_at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n1)" = "$2" ]
}

need_cargo() {
    local want have
    want=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml | head -n1)
    if ! command -v cargo >/dev/null; then
        lack "cargo $want or newer" "install Rust from https://rustup.rs"
        return
    fi
    if ! have=$(cargo --version 2>/dev/null | awk '{ print $2 }') || [ -z "$have" ]; then
        lack "a working cargo" "'cargo --version' fails; with rustup, run 'rustup default stable'"
        return
    fi
    have=${have%%-*}
    version_at_least "$have" "$want" || lack "cargo $want or newer (this is $have)" "with rustup, run 'rustup update stable'"
}

if [ "$(uname -s)" != Linux ]; then
    lack "Linux" "outcore uses mremap, io_uring and O_DIRECT; other systems are not supported"
fi

for tool in "$@"; do
    case $tool in
        cargo) need_cargo ;;
        python3)
            python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null ||
                lack "python3, 3.9 or newer" "install it with the system's package manager"
            ;;
        pip)
            python3 -m pip --version >/dev/null 2>&1 ||
                lack "pip for python3" "install it with the system's package manager (python3-pip) or 'python3 -m ensurepip'"
            ;;
        cc)
            command -v cc >/dev/null || command -v gcc >/dev/null ||
                lack "a C compiler and linker" "install gcc with the system's package manager"
            ;;
        binutils)
            command -v strip >/dev/null && command -v objdump >/dev/null ||
                lack "strip and objdump" "install binutils with the system's package manager"
            ;;
        c++)
            command -v c++ >/dev/null || command -v g++ >/dev/null ||
                lack "a C++ compiler" "libFuzzer and the GPU's kernels are built with it; install g++ with the system's package manager"
            ;;
        rustfmt)
            cargo fmt --version >/dev/null 2>&1 || lack "rustfmt" "with rustup, run 'rustup component add rustfmt'"
            ;;
        clippy)
            cargo clippy --version >/dev/null 2>&1 || lack "clippy" "with rustup, run 'rustup component add clippy'"
            ;;
        *)
            echo "need.sh: unknown tool '$tool'" >&2
            exit 2
            ;;
    esac
done
exit "$missing"
