#!/usr/bin/env python3
"""Compares the hit ratios of outcore's policies with libCacheSim's on the same trace.

    policies.py TRACE [--capacity LIST] [--outcore BINARY]

TRACE has one JSON object a line, whose "hash_ids" are the blocks that a request uses in order. Run it with a Python
that has PyPI's libcachesim (0.3.5 was compared with), after

    cargo build --release -p outcore-cli

All objects have size 1 and ids are numbered in the order of their first use, on both sides. Where libCacheSim keeps
policies whose defaults are not ours, DIFFERENT says in what. The exit status is 1 if any other hit ratio differs by
more than half a point (0.005).
"""

import argparse
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import libcachesim

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 0.005
# Ours, theirs.
PAIRS = {
    "lru": "LRU", "fifo": "FIFO", "clock": "Clock", "s3fifo": "S3FIFO", "arc": "ARC", "2q": "TwoQ", "lirs": "LIRS", "opt": "Belady",
    "sieve": "Sieve", "wtinylfu": "WTinyLFU", "lfu": "LFU",
}  # fmt: skip
DIFFERENT = {
    "lfu": "ours halves its counts after max(10 c, 4096) uses; theirs never does",
    "wtinylfu": "ours counts every use in 4-bit counters with conservative update, halved after 10 c uses; theirs counts"
    " hits of the main part and comings, in a Bloom filter for c entries whose every counter is raised, halved after 32 c"
    " hits: it holds many times as many pages as it is made for, and its estimates depend on the ids",
}  # fmt: skip
NEVER = (1 << 63) - 1


def uses(path):
    """The trace's uses, by numbers."""
    numbers, order = {}, []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.strip():
                order += [numbers.setdefault(block, len(numbers)) for block in json.loads(line)["hash_ids"]]
    return order


def next_uses(order):
    """For each use, when its page is used again, as libCacheSim counts: from 1."""
    seen, following = {}, [NEVER] * len(order)
    for at in range(len(order) - 1, -1, -1):
        following[at] = seen.get(order[at], NEVER)
        seen[order[at]] = at + 1
    return following


def theirs(name, order, following, capacity):
    cache = getattr(libcachesim, name)(capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = 0
    for at, number in enumerate(order):
        request.obj_id, request.clock_time, request.next_access_vtime = number, at, following[at]
        hits += cache.get(request)
    return hits / len(order)


def ours(binary, trace, capacities):
    """Hit ratios by capacity and policy."""
    names = ",".join(name for name in PAIRS if name != "opt")
    command = [binary, "policies", "--trace", trace, "--capacity", ",".join(map(str, capacities)), "--policy", names, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"policies.py: {done.stderr.strip()}")
    found = {}
    for capacity in json.loads(done.stdout)["capacities"]:
        ratios = {policy["policy"]: policy["hit_ratio"] for policy in capacity["policies"]}
        found[capacity["pages"]] = ratios | {"opt": capacity["optimum"]["hit_ratio"]}
    return found


def main():
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("trace", type=Path)
    arguments.add_argument("--capacity", default="1000,5000,20000", help="pages, separated by commas")
    arguments.add_argument("--outcore", type=Path, default=ROOT / "target/release/outcore", help="the command to run")
    options = arguments.parse_args()
    capacities = [int(pages) for pages in options.capacity.split(",")]
    found = ours(options.outcore, options.trace, capacities)
    order = uses(options.trace)
    following = next_uses(order)
    print(f"{len(order)} uses of {len(set(order))} pages; hit ratios of outcore, libCacheSim {version('libcachesim')}, difference\n")
    print("| policy | " + " | ".join(map(str, capacities)) + " |")
    print("|---" * (len(capacities) + 1) + "|")
    far = []
    for name, other in PAIRS.items():
        cells = []
        for capacity in capacities:
            mine, peer = found[capacity][name], theirs(other, order, following, capacity)
            cells.append(f"{mine:.4f} {peer:.4f} {mine - peer:+.4f}")
            if abs(mine - peer) > LIMIT and name not in DIFFERENT:
                far.append(f"{name} at {capacity}")
        print(f"| {name}{'*' if name in DIFFERENT else ''} | " + " | ".join(cells) + " |", flush=True)
    print()
    for name, what in DIFFERENT.items():
        print(f"* {name}: {what}.")
    if far:
        print(f"more than {LIMIT} apart: {', '.join(far)}")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
