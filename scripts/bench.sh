#!/usr/bin/env bash
# Every measurement behind the tables in docs/results: bench.sh [NAME...]
#
# Without names: the cargo benches, then `generate` on real and synthetic models in memory cgroups, and `serve` under
# the load of many clients. BENCH_QUICK=1 takes smaller inputs and fewer rounds. llama.cpp runs beside ours where `make
# peers` has built it, fio beside the probe where it is installed; where they are absent the run says so and quotes
# nothing of them. Results go to docs/results as JSON and as a table.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/fetch_model.sh || echo "bench: the real model could not be fetched; its rows will be missing"
cargo build --release -p outcore-llm --bins
[ ! -e examples/serve/Cargo.toml ] || cargo build --release --manifest-path examples/serve/Cargo.toml --bins
OUTCORE_EMBED=0 cargo build --release -p outcore-cli -p outcore-preload
exec python3 scripts/bench.py "$@"
