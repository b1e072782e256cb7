#!/usr/bin/env bash
# All tests, or only the named steps: test.sh [STEP...]
#
# Every step runs even when an earlier one failed, so that one run shows everything; any failure fails the whole. Steps
# print the test runners' own closing lines. At the end there is one line for each step: ok, FAILED, or SKIPPED for what
# this machine lacks. OUTCORE_REQUIRE tells the tests what this machine is known to have. A test that would skip for
# want of one of these fails. A step builds first, for as long as that takes. What was built then runs. A run that
# prints nothing for SILENT_SECONDS (1200) hangs: it is ended (scripts/watch.py) and has failed. There is no limit on
# how long a step takes.
set -euo pipefail
cd "$(dirname "$0")/.."

steps=(checker workspace python kernels without-features doctests strict released loom examples clients)
target=${CARGO_TARGET_DIR:-target}
# What failed programs printed, for the summary.
failures=$target/test-failures.txt

# The exit status of a step that could not do what it is for.
skipped=77

# Whether the compilers of fetch_nvcc.sh, or NVCC, are there.
has_nvcc() {
    [ -x "${NVCC:-$target/nvcc/nvidia/cu13/bin/nvcc}" ]
}

# Shows that the structural checker can fail, and that the watcher can end what hangs.
step_checker() {
    python3 scripts/check_tree.py --self-test
    python3 scripts/watch.py --self-test
}

# All members with all their features, so that nothing is built twice. Memory of a GPU is tested over an emulated
# driver: no GPU is needed, and none is used. Those of outcore-kv are turned on by the programs that use it. Builds
# without these features are for lint, and for the step without-features.
everything=(--workspace --features outcore-cli/cuda,outcore-gpu-check/cuda,outcore-llm/cuda,outcore-train/cuda)

# Unit, integration and end-to-end tests of all members.
build_workspace() {
    cargo test "${everything[@]}" --lib --bins --tests --no-run
    # The library that `outcore run` loads, and what the libraries for C are made of. Tests of Rust link them nowhere.
    # With the tests, so that they are made of what was built for these.
    cargo build "${everything[@]}" --lib --tests
}
step_workspace() {
    python3 scripts/run_tests.py --failures "$failures" "${everything[@]}" --lib --bins --tests
}

# The extension for Python, as the package that a wheel would have, without torch. `make test-python` runs the rest. The
# extension is that of `workspace`: steps between them would have built its parts in other ways.
build_python() {
    scripts/python_package.sh --find >/dev/null || exit $?
    cargo build "${everything[@]}" --lib --tests
}
step_python() {
    local python package
    python=$(scripts/python_package.sh --find)
    scripts/python_package.sh "$target/python/package"
    # Tests run programs in other folders.
    package=$(realpath "$target/python/package")
    # Tensors that are loaded or pinned.
    PYTHONPATH=$package "$python" -W error -m unittest discover -v -s runtime/python/tests -p 'test_[lr]*.py'
    if ! PYTHONPATH=$package "$python" runtime/python/tests/can_map.py; then
        echo "SKIPPED: this kernel has no userfaultfd, or forbids it: tensors were loaded and pinned, no model mapped" >&2
        exit "$skipped"
    fi
    # A release build has the library of `outcore run` in it.
    OUTCORE_PRELOAD=$(realpath "$target")/debug/liboutcore_preload.so PYTHONPATH=$package \
        "$python" -W error -m unittest discover -v -s runtime/python/tests -p 'test_p*.py'
}

# The GPU's kernels, compiled for GPUs where the compilers can be had. Other tests have run them from their source.
build_kernels() {
    if ! has_nvcc; then
        echo "SKIPPED: there are no GPU compilers: the kernels were not compiled for any GPU" >&2
        exit "$skipped"
    fi
    scripts/check_kernels.sh
}
step_kernels() {
    : # they are only compiled
}

# Where only the compiler takes long.
ours_unoptimised=()
for package in outcore outcore-pager outcore-kv outcore-testkit; do
    ours_unoptimised+=(--config "profile.dev.package.$package.opt-level=0")
done

# What generate and `outcore doctor` say of a GPU in a build that knows none. The packages are those of `workspace`, so
# that only outcore-llm and outcore-cli are built again. What outcore-kv says of stores that need a feature which it was
# not built with, and what it does without: alone, because the programs turn its features on. A filter that matches
# nothing would pass, so the tests are counted. Nothing is computed here, so nothing has to be fast.
without_cuda=(--config 'profile.dev.package.outcore-llm.opt-level=0' --workspace
    --features outcore-gpu-check/cuda --test generate --test cli)
without_codecs=("${ours_unoptimised[@]}" -p outcore-kv --lib --test codecs)
build_without-features() {
    cargo test "${without_cuda[@]}" --no-run
    cargo test "${without_codecs[@]}" --no-run
}
step_without-features() {
    local log=$target/without-features.log
    cargo test "${without_cuda[@]}" without_the_feature 2>&1 | tee "$log"
    [ "$(grep -cE '^test result: ok\. 1 passed' "$log")" = 2 ] ||
        { echo "without-features: a test did not run" >&2; exit 1; }
    cargo test "${without_codecs[@]}" 2>&1 | tee "$log"
    [ "$(grep -cE '^test without_the_feature::.* ok$' "$log")" = 2 ] ||
        { echo "without-features: a test of outcore-kv did not run" >&2; exit 1; }
}

# Cargo compiles doctests only to run them, with the libraries of `workspace`.
step_doctests() {
    cargo test "${everything[@]}" --doc --no-fail-fast
}

# The tests that touch pages of the host device, again with evicted ranges inaccessible. The other devices, the pager
# and the formats do the same in both. The programs are those of `workspace`.
strict_tests=(--test runtime --test device --test store --test process)
same=(cuda on_sim suite::sim emulator pins_on_streams)
build_strict() {
    cargo test "${everything[@]}" "${strict_tests[@]}" --no-run
}
step_strict() {
    OUTCORE_STRICT=1 python3 scripts/run_tests.py --failures "$failures" "${everything[@]}" "${strict_tests[@]}" \
        -- "${same[@]/#/--skip=}"
}

# What a release build does with a transition of a page that cannot happen, where all other builds stop. A filter that
# matches nothing would pass, so the tests are counted. They run for a second: nothing has to be fast.
released=("${ours_unoptimised[@]}" --config 'profile.dev.package.outcore-pager.debug-assertions=false'
    -p outcore-pager --lib)
build_released() {
    cargo test "${released[@]}" --no-run
}
step_released() {
    cargo test "${released[@]}" tests:: 2>&1 | tee "$target/released.log"
    grep -qE '^test result: ok\. [1-9]' "$target/released.log" || { echo "released: no test ran" >&2; exit 1; }
}

# The page word under every schedule loom finds. A filter that matches nothing would pass, so the tests are counted.
# Everything is built anew for this flag, and run for a second: nothing has to be fast.
with_loom() {
    RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-2} CARGO_TARGET_DIR="$target/loom" \
        cargo test --config 'profile.dev.opt-level=0' --config 'profile.dev.package."*".opt-level=0' -p outcore-pager --lib "$@"
}
build_loom() {
    with_loom --no-run
}
step_loom() {
    if ! grep -rqE 'fn loom_' runtime; then
        echo "no loom tests in this tree"
        return
    fi
    mkdir -p "$target"
    with_loom loom_ 2>&1 | tee "$target/loom.log"
    if ! grep -qE '^test result: ok\. [1-9]' "$target/loom.log"; then
        echo "loom: no test ran" >&2
        return 1
    fi
}

# Every example of the package, run in an empty directory.
build_examples() {
    cargo build "${everything[@]}" --examples
}
step_examples() {
    local names name dir binaries
    names=$(cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
for package in json.load(sys.stdin)["packages"]:
    if package["name"] == "outcore":
        print(*[target["name"] for target in package["targets"] if "example" in target["kind"]], sep="\n")')
    if [ -z "$names" ]; then
        echo "no examples in this tree"
        return
    fi
    binaries=$(realpath "$target")/debug/examples
    dir=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$dir'" EXIT
    for name in $names; do
        echo "-- example $name"
        if ! (cd "$dir" && "$binaries/$name"); then
            echo "example $name failed" >&2
            return 1
        fi
    done
}

# serve, asked by OpenAI's client for Python and by curl, and its page in a browser.
build_clients() {
    if ! scripts/fetch_clients.sh; then
        echo "SKIPPED: OpenAI's client could not be fetched: serve was not asked by the clients that people use" >&2
        exit "$skipped"
    fi
    case ,${OUTCORE_REQUIRE:-}, in
        # With its tests, so that it is the program of `workspace`.
        *,model,*) cargo test "${everything[@]}" --test http --no-run ;;
        *) echo "SKIPPED: there is no real model: serve was not asked by the clients that people use" >&2
            exit "$skipped" ;;
    esac
}
step_clients() {
    SERVE=$(realpath "$target")/debug/serve scripts/test_clients.py
}

if [ "${1:-}" = --build ]; then
    if declare -F "build_$2" >/dev/null; then
        "build_$2" </dev/null
    fi
    exit
fi
if [ "${1:-}" = --step ]; then
    "step_$2" </dev/null
    exit
fi
for name in "$@"; do
    if ! declare -F "step_$name" >/dev/null; then
        echo "test.sh: no step '$name'; there are: ${steps[*]}" >&2
        exit 2
    fi
done
if [ $# -gt 0 ]; then
    steps=("$@")
fi

results=()
failed=0
mkdir -p "$target"
: >"$failures"
# What this machine has, so that no test may skip for want of it. Cargo builds the emulated CUDA driver.
required=(emulated preload)

# The real model. Without a network the end-to-end tests skip and say so.
printf '== model\n'
if [ -x scripts/fetch_model.sh ] && scripts/fetch_model.sh </dev/null; then
    results+=("ok      model for the end-to-end tests")
    required+=(model)
else
    echo "WARNING: no real model: the end-to-end tests will SKIP" >&2
    results+=("SKIPPED the model could not be fetched: no test ran a real model")
fi

printf '\n== compilers and programs\n'
if command -v cc >/dev/null; then
    required+=(c)
    if echo 'int main(void) { return 0; }' | cc -fsanitize=address,undefined -x c - -o /dev/null 2>/dev/null; then
        required+=(asan)
    else
        results+=("SKIPPED the C compiler has no sanitizers: no test checked what C programs access")
    fi
else
    results+=("SKIPPED there is no C compiler (cc): no test linked the libraries for C")
fi
compiler=${CXX:-c++}
if command -v "${compiler%% *}" >/dev/null; then
    required+=(c++)
else
    results+=("SKIPPED there is no C++ compiler ($compiler): no test ran the GPU's kernels")
fi
if has_nvcc || scripts/fetch_nvcc.sh </dev/null; then
    [ ! -e "$target/nvcc/nvidia/cu13/lib/libnvrtc.so.13" ] || required+=(nvrtc)
else
    results+=("SKIPPED the GPU compilers could not be fetched: NVRTC was not run")
fi
if scripts/fetch_programs.sh </dev/null; then
    required+=(programs)
else
    results+=("SKIPPED numpy and safetensors could not be fetched: \`outcore run\` ran neither")
fi
browser=${OUTCORE_CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
if [ -n "$browser" ]; then
    required+=(browser)
else
    results+=("SKIPPED there is no Chromium (install it, or name one in OUTCORE_CHROMIUM): no browser drew a report or serve's page")
fi
# Steps print through a pipe, where cargo would use no colours.
[ ! -t 2 ] || export CARGO_TERM_COLOR=always
OUTCORE_REQUIRE=$(IFS=,; echo "${required[*]}")
export OUTCORE_REQUIRE

for name in "${steps[@]}"; do
    printf '\n== %s\n' "$name"
    begin=$SECONDS
    # Both are processes of their own: in a function called under `||`, bash would not stop at a failing command.
    status=0
    bash scripts/test.sh --build "$name" || status=$?
    built=$SECONDS
    if [ "$status" -eq 0 ]; then
        python3 scripts/watch.py "${SILENT_SECONDS:-1200}" bash scripts/test.sh --step "$name" || status=$?
    fi
    took="$((built - begin)) s to build, $((SECONDS - built)) s to run"
    if [ "$status" -eq "$skipped" ]; then
        results+=("SKIPPED $name, which says why")
    elif [ "$status" -eq 0 ]; then
        results+=("ok      $name, $took")
    else
        results+=("FAILED  $name, $took, status $status")
        failed=1
    fi
done

if [ -s "$failures" ]; then
    printf '\n== failures\n'
    cat "$failures"
fi
printf '\n== summary, %s s\n' "$SECONDS"
printf '%s\n' "${results[@]}"
if [ "$failed" -ne 0 ]; then
    echo "make test: FAILED"
    exit 1
fi
echo "make test: ok"
