#!/usr/bin/env python3
"""Whether the settings that are chosen are the best: defaults.py [--rounds N] [--coarse] MODEL:BUDGET...

For each cell, `generate` runs with what it chooses itself and with other page sizes and lookaheads. With --coarse every
combination runs once and the best three go on; without, a fixed few do. Then these and the choice itself run N times
(5), interleaved in random order. The last line of a cell is the choice's median over the best median. Build first:
cargo build --release -p outcore-llm --bins
"""

import argparse
import os
import random
import statistics
import sys
from pathlib import Path

from bench import PROMPT, RELEASE, last_json, run

CHOICE = (None, None)
PAGES = ["256KiB", "512KiB", "1MiB", "2MiB", "4MiB"]
LOOKAHEADS = ["4MiB", "16MiB", "32MiB", "64MiB"]
FEW = [("512KiB", "auto"), ("1MiB", "auto"), ("2MiB", "16MiB"), ("2MiB", "32MiB"), ("4MiB", "auto")]
# About how many bytes of weights a run reads: so many that its first passes hardly count.
READ = 6 << 30


def tokens_a_second(model, budget, setting):
    """Tokens a second of the median pass; None where the setting is refused."""
    page, lookahead = setting
    tokens = max(4, min(40, READ // Path(model).stat().st_size))
    command = [RELEASE / "generate", "--model", model, "--prompt-tokens", PROMPT, "--tokens", tokens]
    command += ["--device-budget", budget, "--json"]
    command += ["--page-size", page] if page else []
    command += ["--prefetch", lookahead] if lookahead else []
    found = last_json(run(command).stdout)
    return 1 / found["pass_s_median"] if found else None


def name(setting):
    return "the choice" if setting == CHOICE else f"pages of {setting[0]}, {setting[1]} ahead"


def cell(model, budget, options):
    others = FEW
    if options.coarse:
        found = [(tokens_a_second(model, budget, s), s) for s in ((p, l) for p in PAGES for l in LOOKAHEADS)]
        others = [s for rate, s in sorted((f for f in found if f[0]), reverse=True)[:3]]
    rates = {setting: [] for setting in [CHOICE, *others]}
    for _ in range(options.rounds):
        for setting in random.sample(list(rates), len(rates)):
            rate = tokens_a_second(model, budget, setting)
            if rate:
                rates[setting].append(rate)
    if not rates[CHOICE]:
        sys.exit(f"defaults: generate fails on {model} with {budget}")
    medians = {setting: statistics.median(found) for setting, found in rates.items() if found}
    print(f"\n{Path(model).name} in {budget}, load {os.getloadavg()[0]:.1f}: tokens a second")
    for setting, median in sorted(medians.items(), key=lambda item: -item[1]):
        found = rates[setting]
        print(f"  {median:7.2f} [{min(found):.2f} - {max(found):.2f}]  {name(setting)}")
    of_best = medians[CHOICE] / max(medians.values())
    print(f"  the choice / the best: {of_best:.3f}", flush=True)
    return of_best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="MODEL:BUDGET")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--coarse", action="store_true")
    options = parser.parse_args()
    found = [cell(*text.rsplit(":", 1), options) for text in options.cells]
    print(f"\n{sum(ratio >= 0.95 for ratio in found)} of {len(found)} cells at 0.95 or more, the least {min(found):.3f}")


if __name__ == "__main__":
    main()
