#!/usr/bin/env bash
# Runs every fuzz target for FUZZ_SECONDS. Crashing inputs stay in fuzz/artifacts; give one a name and put it in the
# target's corpus folder together with the fix.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${FUZZ_SECONDS:-60}
if [ ! -f fuzz/Cargo.toml ]; then
    echo "fuzz: there is no fuzz/Cargo.toml in this tree" >&2
    exit 1
fi
if ! cargo fuzz --version >/dev/null 2>&1; then
    echo "fuzz: installing cargo-fuzz"
    cargo install cargo-fuzz --locked
fi

# Sanitizers are a nightly feature. A nightly toolchain is used where there is one; else the stable compiler is asked
# to accept the same flags.
fuzz=(cargo fuzz)
if cargo +nightly --version >/dev/null 2>&1; then
    fuzz=(cargo +nightly fuzz)
else
    export RUSTC_BOOTSTRAP=1
fi

targets=$("${fuzz[@]}" list)
if [ -z "$targets" ]; then
    echo "fuzz: no targets" >&2
    exit 1
fi
failed=()
found=$(mktemp -d)
trap 'rm -rf "$found"' EXIT

# A target that must fail: without it, a fuzzer that finds nothing might be one that looks at nothing.
printf '\n== fuzz canary, which must report a crash\n'
if "${fuzz[@]}" run canary fuzz/corpus/gguf -- -runs=1000 </dev/null >"$found/canary.log" 2>&1; then
    echo "fuzz: the canary target found nothing"
    failed+=(canary)
elif ! grep -q 'panicked at' "$found/canary.log"; then
    tail -20 "$found/canary.log"
    failed+=(canary)
fi

for name in $targets; do
    [ "$name" = canary ] && continue
    printf '\n== fuzz %s, %s s\n' "$name" "$seconds"
    # New inputs go to the first folder; the corpus in the tree is only read.
    mkdir "$found/$name"
    "${fuzz[@]}" run "$name" "$found/$name" "fuzz/corpus/$name" -- \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=512 </dev/null || failed+=("$name")
done
if [ "${#failed[@]}" -ne 0 ]; then
    echo "fuzz: FAILED: ${failed[*]}"
    exit 1
fi
echo "fuzz: ok"
