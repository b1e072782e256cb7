#!/usr/bin/env bash
# Runs SmolLM2-135M twice with the same prompt, once with every weight resident and once in a small device budget, and
# shows that the words are the same and where the time went. Then llama.cpp, if `make peers` has built it: with plain
# mmap and under `outcore run`, in one memory cgroup.
#
# PROMPT, TOKENS, BUDGET (32MiB) and MODEL may be set; TARGET_CPU (native) is what the programs are built for.
set -euo pipefail
cd "$(dirname "$0")/.."

prompt=${PROMPT:-"Explain virtual memory in two sentences."}
tokens=${TOKENS:-48}
budget=${BUDGET:-32MiB}

model=${MODEL:-}
if [ -z "$model" ]; then
    scripts/fetch_model.sh
    for file in models/SmolLM2-135M-Instruct*.gguf; do
        [ -f "$file" ] && model=$file && break
    done
fi
if [ -z "$model" ] || [ ! -f "$model" ]; then
    echo "demo: no model: expected models/SmolLM2-135M-Instruct*.gguf, or set MODEL to a GGUF file" >&2
    exit 1
fi

build() {
    RUSTFLAGS="${RUSTFLAGS:-} -C target-cpu=${TARGET_CPU:-native}" cargo build --release "$@"
}
# GENERATE names a ready-made program instead of building one.
generate=${GENERATE:-}
if [ -z "$generate" ]; then
    echo "demo: building (some minutes the first time)"
    build -p outcore-llm --bin generate
    generate=${CARGO_TARGET_DIR:-target}/release/generate
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# run NAME DEVICE_BUDGET
run() {
    printf '\n== %s: device budget %s\n' "$1" "$2"
    "$generate" --model "$model" --prompt "$prompt" --chat --temperature 0 --tokens "$tokens" --device-budget "$2" --json \
        </dev/null >"$out/$1" || {
        echo "demo: the '$1' run failed" >&2
        exit 1
    }
}

# Room for every page and a little more: nothing is ever evicted.
resident=$(($(stat -c %s "$model") / 1048576 + 64))MiB
run resident "$resident"
run paged "$budget"
python3 scripts/demo_report.py "$out/resident" "$out/paged"

if [ ! -x "${OUTCORE_PEERS:-.venv}/bin/llama-peer" ]; then
    printf '\ndemo: llama.cpp under `outcore run` was not shown: it is not built; `make peers` builds it\n'
elif ! said=$(scripts/cgroup_run.sh 64MiB true 2>&1); then
    printf '\ndemo: llama.cpp under `outcore run` was not shown: it needs memory cgroups, which root can make (%s)\n' \
        "$(tail -n 1 <<<"$said")"
else
    # The library lies beside the program, so that none has to be put into it.
    OUTCORE_EMBED=0 build -p outcore-cli -p outcore-preload
    python3 scripts/demo_mapped.py "$model"
fi
