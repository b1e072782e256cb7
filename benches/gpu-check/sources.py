#!/usr/bin/env python3
"""Prints, as JSON, a hash of what each part of the GPU check is made of. Called when the bundle is packed: what passed on
a card and has not changed since can run behind what has. Standard library only."""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = "benches/gpu-check"
# Of every part of the probe.
PROBE = ["Cargo.lock", f"{HERE}/Cargo.toml", f"{HERE}/src/kernels.ptx"] + [
    f"{HERE}/src/{name}.rs" for name in ("clocks", "compute", "cuda", "lib", "model", "processor", "report")]
# The library with the CUDA device.
RUNTIME = ["Cargo.lock"] + [f"runtime/{folder}/**/*.rs" for folder in ("cuda", "gpu", "kv", "outcore", "pager")]
MODEL = [*RUNTIME, "examples/llm/src/**/*"]
TRAIN = [f"runtime/train/{files}" for files in ("*.rs", "cuda/*", "tests/cuda.rs", "tests/cuda/*")]
# Beside the tests of kernels: how they find the GPU, or its emulation.
KERNEL_TESTS = ["examples/llm/tests/**/*.rs", "tests/kit/emulated_kernels.rs", "tests/kit/emulation/*"]
EXTRA = [f"{HERE}/extra.py", f"{HERE}/limits.py"]
SOAK = ["tests/soak/*"]
PEERS = [f"{HERE}/peers.py", f"{HERE}/limits.py"]


def probe(*files):
    return PROBE + [f"{HERE}/src/parts/{name}.rs" for name in files]


def with_runtime(*files):
    return RUNTIME + probe("pass", *files)


PARTS = {
    "machine": with_runtime("machine"),
    "queue": probe("queue"),
    "copies": probe("copies"),
    "mapping": probe("mapping"),
    "mapping-variants": probe("variants"),
    "events": probe("events"),
    "lock": probe("lock"),
    "pin": with_runtime("pin"),
    "disk": with_runtime("disk"),
    "first-page": with_runtime("first_page"),
    "overlap": with_runtime("overlap", "copies"),
    "oversized": with_runtime("oversized", "copies"),
    "three-tier": with_runtime("oversized", "copies"),
    "sweep": with_runtime("sweep", "copies"),
    "budget": with_runtime("budget"),
    "managed": with_runtime("managed"),
    "soak": with_runtime("soak*") + SOAK,
    "soak-sanitized": with_runtime("soak*") + SOAK + EXTRA,
    "children": with_runtime() + [f"{HERE}/src/children.rs"] + EXTRA,
    "device-suite": RUNTIME + ["tests/device/**/*"] + EXTRA,
    "runtime-suite": RUNTIME + ["tests/device/**/*"] + EXTRA,
    "kernels": MODEL + TRAIN + KERNEL_TESTS + EXTRA,
    "generate": MODEL + EXTRA,
    "ncu": MODEL + EXTRA,
    "torch-decode": MODEL + PEERS,
    "torch-stream": with_runtime("oversized") + PEERS,
    "accelerate": with_runtime("oversized") + PEERS,
    "llama": MODEL + PEERS + ["scripts/fetch_gpu_peers.sh"],
}


def files_of(patterns):
    """The files that patterns name. One that names none is a mistake in this table."""
    found = set()
    for pattern in patterns:
        files = {path for path in ROOT.glob(pattern) if path.is_file()}
        if not files:
            sys.exit(f"sources.py: {pattern} is not there")
        found |= files
    return sorted(found)


def hash_of(patterns):
    digest = hashlib.sha256()
    for path in files_of(patterns):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    json.dump({name: hash_of(patterns) for name, patterns in PARTS.items()}, sys.stdout, indent=1)
    print()
