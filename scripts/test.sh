#!/usr/bin/env bash
# All tests. Every step runs even when an earlier one failed, so that one run shows everything; the exit status is the
# sum. Steps print the test runners' own closing lines and, at the end, one line each.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
results=()
failed=0
started=$SECONDS

# step NAME COMMAND...
step() {
    local name=$1 begin=$SECONDS status=0
    shift
    printf '\n== %s\n' "$name"
    "$@" </dev/null || status=$?
    if [ "$status" -eq 0 ]; then
        results+=("ok      $((SECONDS - begin)) s  $name")
    else
        results+=("FAILED  $((SECONDS - begin)) s  $name (status $status)")
        failed=1
    fi
}

# The real model. Without a network the end-to-end tests skip and say so.
fetch_model() {
    if [ -x scripts/fetch_model.sh ] && scripts/fetch_model.sh; then
        results+=("ok      model for the end-to-end tests")
        return
    fi
    echo "WARNING: no real model: the end-to-end tests will SKIP" >&2
    results+=("SKIPPED model could not be fetched: end-to-end tests did not check a real model")
}

workspace_tests() {
    cargo test --workspace --features outcore/cli --lib --bins --tests --no-fail-fast
}

doctests() {
    cargo test --workspace --doc --no-fail-fast
}

strict_tests() {
    cargo test -p outcore --features strict --lib --tests --no-fail-fast
}

# Tests of the page word under every schedule loom finds. A filter that matches nothing would pass: count.
loom_tests() {
    if ! grep -rqE 'fn loom_' runtime; then
        echo "no loom tests in this tree"
        return
    fi
    local log=$target/loom.log
    mkdir -p "$target"
    RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-2} \
        CARGO_TARGET_DIR="$target/loom" CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true \
        cargo test -p outcore --lib --release loom_ 2>&1 | tee "$log"
    if ! grep -qE '^test result: ok\. [1-9]' "$log"; then
        echo "loom: no test ran" >&2
        return 1
    fi
}

# Runs every example of the package, in an empty directory. Examples get a time limit: one that hangs is a failure.
examples() {
    local names name dir
    names=$(cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
for package in json.load(sys.stdin)["packages"]:
    if package["name"] == "outcore":
        for target in package["targets"]:
            if "example" in target["kind"]:
                print(target["name"])')
    if [ -z "$names" ]; then
        echo "no examples in this tree"
        return
    fi
    cargo build --examples
    local binaries
    binaries=$(realpath "$target")/debug/examples
    dir=$(mktemp -d)
    for name in $names; do
        echo "-- example $name"
        (cd "$dir" && timeout --kill-after=10 "${EXAMPLE_SECONDS:-180}" "$binaries/$name") || {
            echo "example $name failed" >&2
            rm -rf "$dir"
            return 1
        }
    done
    rm -rf "$dir"
}

tree_checks() {
    python3 scripts/check_tree.py --self-test
}

printf '== model\n'
fetch_model
step "structural checker's own tests" tree_checks
step "workspace tests" workspace_tests
step "doctests" doctests
step "library tests, feature strict" strict_tests
step "loom" loom_tests
step "examples" examples

printf '\n== summary, %s s\n' "$((SECONDS - started))"
printf '%s\n' "${results[@]}"
if [ "$failed" -ne 0 ]; then
    echo "make test: FAILED"
    exit 1
fi
echo "make test: ok"
