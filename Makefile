# Everything a contributor or a user types. `make help` lists the targets; each one checks for what it needs first.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 1200

.PHONY: help demo capi wheel test test-python bench gpu-check gpu-peers peers soak fuzz lint fmt clean

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Run a real model in 32 MiB and compare its words with a run that holds everything
	@scripts/need.sh cargo cc python3 pip
	@scripts/demo.sh

capi: ## The libraries and the header for C, in release, into PREFIX (target/capi)
	@scripts/need.sh cargo cc binutils
	@scripts/capi.sh "$(PREFIX)"

wheel: ## The Python package as a wheel for Linux with glibc 2.28 or later, in target/wheels; installs zig and maturin into target/wheel
	@scripts/need.sh cargo cc python3 pip
	@scripts/wheel.sh

test: ## All tests, doctests and examples
	@scripts/need.sh cargo cc python3 pip
	@scripts/test.sh

test-python: ## The Python package with torch and transformers, which it installs into target/python/venv (3 to 6 GB)
	@scripts/need.sh cargo cc python3 pip
	@scripts/test_python.sh

bench: ## The measurements behind the tables in docs/results
	@scripts/need.sh cargo cc python3 pip
	@scripts/bench.sh

gpu-check: ## Pack what proves the CUDA device into target/gpu-check/bundle, and its peers into bundle-peers, for a machine with a GPU; compiles the kernels first
	@scripts/need.sh cargo cc python3 binutils
	@scripts/gpu_check_bundle.sh

gpu-peers: ## Build llama.cpp's llama-bench for an H100, for the second run of the GPU check (an hour; needs no GPU)
	@scripts/need.sh cargo cc c++ python3 pip
	@scripts/fetch_gpu_peers.sh

peers: ## Build llama.cpp and its server and fetch libCacheSim into .venv, for `make bench` to compare with (ten minutes)
	@scripts/need.sh cc c++ python3 pip
	@scripts/fetch_peers.sh

soak: ## Random work with injected failures for SOAK_SECONDS (1200) on every device and on mapped files, bytes on an emulated GPU summed under overlap, simulated machines, 10 million failed moves of the pager alone, a million judged operations, a million tensors, 1000 processes killed while they commit, a tebibyte walked, 200 GiB walked in 320 MB, a model's logits under every setting, then 64 streams of the server, and 64 of a mixture in half its memory
	@scripts/need.sh cargo cc python3 pip
	OUTCORE_SOAK_SECONDS=$(SOAK_SECONDS) cargo test --release --test runtime --test simulate --test process -- --ignored --nocapture --test-threads 1
	cargo test --release -p outcore-pager --test pager -- --ignored --nocapture soak_of_failed_moves
	OUTCORE_SOAK_SECONDS=$(SOAK_SECONDS) cargo test --release --test device -- --ignored --nocapture emulated::overlap_soak
	OUTCORE_SOAK_SECONDS=$(SOAK_SECONDS) cargo test --release -p outcore-mapped --test mapped_soak -- --ignored --nocapture
	OUTCORE_ALL=1 cargo test --test runtime --test device -- any_one whatever_call_fails interrupted
	OUTCORE_KILLS=1000 OUTCORE_CUTS=2000 cargo test -p outcore --lib --test runtime -- --nocapture power_cut whatever_call_it_is_killed
	@scripts/fetch_model.sh
	cargo test --workspace --test generate -- --ignored --nocapture
	cargo build --release -p outcore-serve
	python3 scripts/soak_serve.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --seconds $(SOAK_SECONDS)
	cargo run --release -p outcore-llm --bin make_model -- target/soak-mixture.gguf --arch qwen3moe --layers 12 --dim 1024 --heads 16 --kv-heads 4 --ffn 512 --vocab 32000 --experts 64 --experts-used 4
	python3 scripts/soak_serve.py --model target/soak-mixture.gguf --memory 700MB --seconds $(SOAK_SECONDS) -- --context 1024

fuzz: ## Every fuzz target for FUZZ_SECONDS (60); installs cargo-fuzz if it is missing
	@scripts/need.sh cargo c++
	@FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/fuzz.sh

lint: ## Formatting, clippy, rustdoc and the structural checks
	@scripts/need.sh cargo cc python3 rustfmt clippy
	@scripts/lint.sh

fmt: ## Format the Rust sources
	@scripts/need.sh cargo rustfmt
	cargo fmt --all

clean: ## Remove build output; fetched models stay
	cargo clean
	rm -rf fuzz/target fuzz/artifacts
