#!/usr/bin/env python3
"""Compares two runs of `generate --json`: demo_report.py RESIDENT PAGED

Each file is a run's standard output; its last non-empty line is the JSON summary. Exits 1 where the texts differ.
"""

import json
import sys


def summary(path):
    with open(path, encoding="utf-8") as file:
        lines = [line for line in file.read().splitlines() if line.strip()]
    if not lines:
        sys.exit(f"demo: {path} is empty: the run printed nothing")
    try:
        return json.loads(lines[-1])
    except json.JSONDecodeError as error:
        sys.exit(f"demo: the last line of {path} is not JSON: {error}")


def size(n):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024


def seconds(n):
    return f"{n * 1000:.1f} ms" if n < 1 else f"{n:.2f} s"


def rate(n):
    return f"{n:.1f}"


def percent(n):
    return f"{n * 100:.1f} %"


def text(value):
    return str(value)


ROWS = [
    ("page", "page_bytes", size),
    ("device budget", "device_budget_bytes", size),
    ("host budget", "host_budget_bytes", size),
    ("policy", "policy", text),
    ("reads files by", "io", text),
    ("first token after", "ttft_s", seconds),
    ("tokens a second", "decode_tok_s", rate),
    ("one pass, median", "pass_s_median", seconds),
    ("computing", "compute_s", seconds),
    ("waiting for pages", "stall_s", seconds),
    ("transfer hidden behind compute", "overlap", percent),
    ("read from disk", "disk_read_bytes", size),
    ("written to disk", "disk_written_bytes", size),
    ("copied into the device", "link_bytes", size),
    ("hits", "hit_ratio", percent),
    ("best possible hits", "opt_hit_ratio", percent),
    ("device memory, peak", "peak_device_bytes", size),
    ("host memory, peak", "peak_host_bytes", size),
    ("whole process, peak", "peak_rss_bytes", size),
]


def cell(run, key, show):
    value = run.get(key)
    return "-" if value is None else show(value)


def main(resident_path, paged_path):
    resident, paged = summary(resident_path), summary(paged_path)
    for name, run in (("Everything resident", resident), ("Paged", paged)):
        print(f"\n{name}:\n  " + str(run.get("text", "")).strip().replace("\n", "\n  "))
    print(f"\n{'':32}{'resident':>14}{'paged':>14}")
    for label, key, show in ROWS:
        print(f"{label:32}{cell(resident, key, show):>14}{cell(paged, key, show):>14}")
    same = resident.get("text") == paged.get("text") and resident.get("tokens") == paged.get("tokens")
    if not resident.get("text"):
        print("\nFAILED: the resident run produced no text.")
        return 1
    if same:
        print(f"\nSame text, word for word, with {cell(paged, 'device_budget_bytes', size)} of device memory.")
        return 0
    print("\nFAILED: the two texts differ.")
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2]))
