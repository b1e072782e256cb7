#!/usr/bin/env bash
# Formatting, lints, documentation and structure. Stops at the first failure.
set -euo pipefail
cd "$(dirname "$0")/.."

times=()
name=
# Names the next step, and notes how long the last one took.
say() {
    [ -z "$name" ] || times+=("$name, $((SECONDS - begin)) s")
    name=$1 begin=$SECONDS
    [ -z "$name" ] || printf '\n== %s\n' "$name"
}

say "structure"
python3 scripts/check_tree.py
say "the kernels' PTX is of their sources"
python3 scripts/kernels_ptx.py
say "shell scripts parse"
for script in scripts/*.sh benches/gpu-check/run.sh .ci/run; do
    bash -n "$script"
done
if command -v shellcheck >/dev/null; then
    shellcheck scripts/*.sh benches/gpu-check/run.sh .ci/run
fi
say "Cargo.lock is up to date"
cargo metadata --locked --format-version 1 >/dev/null
say "format"
cargo fmt --all --check
# Everything first, because the other steps need what this builds of the dependencies.
all=(--features outcore-cli/cuda,outcore-gpu-check/cuda,outcore-llm/cuda,outcore-train/cuda,outcore/strict)
say "clippy, all that there is"
cargo clippy --workspace --all-targets "${all[@]}" -- -D warnings
say "clippy, without features"
cargo clippy --workspace --all-targets -- -D warnings
# Alone, because the programs of the workspace turn its features on.
cargo clippy -p outcore-kv --all-targets -- -D warnings
for feature in encryption compression; do
    cargo clippy -p outcore-kv --lib --test codecs --features "$feature" -- -D warnings
done
say "documentation, and the public surface"
# Without the test kit, which would have outcore documented with its feature `testing`.
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --exclude outcore-testkit --no-deps "${all[@]}"
python3 scripts/public_api.py "${CARGO_TARGET_DIR:-target}/doc/outcore"
# In the order in which they depend on each other; each is compiled from what would be published.
say "packages"
packages=(-p outcore-pager -p outcore -p outcore-gpu -p outcore-cuda -p outcore-lab -p outcore-mapped -p outcore-kv
          -p outcore-quants -p outcore-train)
packages+=(-p outcore-cli)
# Cargo keeps what it unpacked of an earlier try, by name and version, in registries without a name; our versions stay
# the same, so it would compile the old sources.
rm -rf "${CARGO_HOME:-$HOME/.cargo}"/registry/{src,cache}/-*/outcore{,-pager,-gpu,-cuda,-lab,-mapped,-kv,-quants,-train,-cli}-[0-9]*
# Nor does it see that what it built of them is of the old sources.
built=${CARGO_TARGET_DIR:-target}/publish
rm -rf "$built"/debug/.fingerprint/outcore*
# It warns of each test that is left out on purpose. What it builds is not run.
if ! said=$(CARGO_TARGET_DIR=$built CARGO_PROFILE_DEV_OPT_LEVEL=0 cargo publish --dry-run --allow-dirty "${packages[@]}" 2>&1); then
    printf '%s\n' "$said" >&2
    exit 1
fi
# The fuzz targets are a workspace of their own, and libFuzzer needs a C++ compiler.
if [ -f fuzz/Cargo.toml ]; then
    say "fuzz targets"
    cargo fmt --manifest-path fuzz/Cargo.toml --check
    if command -v c++ >/dev/null; then
        cargo clippy --manifest-path fuzz/Cargo.toml -- -D warnings
    else
        echo "SKIPPED: no C++ compiler, the fuzz targets were not compiled"
    fi
fi
say ""
printf '\n== summary, %s s\n' "$SECONDS"
printf 'ok      %s\n' "${times[@]}"
echo "lint: ok"
