#!/usr/bin/env python3
"""llama.cpp with plain `mmap` and under `outcore run`, in a memory cgroup that its model does not fit, for `make demo`.

    demo_mapped.py MODEL

Prints a table. Exit status 1: a run failed, or the two made different tokens.
"""

import sys
from pathlib import Path

from bench_mapped import MIB, Model, once

TOKENS = 48
# Beside pages: the program itself, and what grows with the model (keys and values, what is computed with).
OWN = 40 * MIB
OWN_PART = 20


def size(count):
    return f"{count / MIB:.1f} MiB"


def main():
    file = Path(sys.argv[1])
    length = file.stat().st_size
    # A quarter of the model does not fit.
    limit = length * 3 // 4 + OWN
    budget = limit - OWN - length // OWN_PART
    limit, budget = limit // MIB, budget // MIB
    model = Model(file.name, file, TOKENS)
    print(f"\n== llama.cpp, unmodified: {file.name} ({size(length)}) in a memory cgroup of {limit} MiB, page cache counted in")
    found = {}
    for name, with_budget in [("plain mmap", None), ("outcore run", budget)]:
        got = once(model, TOKENS, limit, with_budget)
        if "skipped" in got:
            print(f"demo: llama.cpp was not run: {got['skipped']}")
            return 0
        if "failed" in got:
            print(f"demo: {name} failed: {got['failed']}", file=sys.stderr)
            return 1
        found[name] = got
    print(f"  {'':<14}{'tokens/s':>10}{'read a token':>16}{'peak of the cgroup':>22}")
    for name, got in found.items():
        peak = size(got["peak"]) if got["peak"] else "?"
        print(f"  {name:<14}{got['tok_s']:>10.1f}{size(got['read_a_token']):>16}{peak:>22}")
    plain, ours = found.values()
    same = plain["tokens"] == ours["tokens"]
    print(f"  outcore run --budget {budget}MiB: {ours['tok_s'] / plain['tok_s']:.1f} times as fast; tokens {'the same' if same else 'DIFFER'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
