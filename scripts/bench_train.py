#!/usr/bin/env python3
"""`train` in little memory beside itself with all it needs: the same losses, bit for bit, and how much slower?

    bench_train.py [SCENARIO...] [--rounds N] [--steps N] [--dir DIR] [--model GGUF] [--json]

scratch    a byte-level model of 32 M parameters from scratch, in 160 MiB: a quarter of what it takes in core
tune-128   full fine-tuning of SmolLM2-135M, whose state has 2.2 GB, in 512 MiB, 128 tokens a step
tune-128-mixed
           the same with --mixed
tune-2048  the same, 2048 tokens a step

In turns in each round: in core, and within the limit. A side's time is the median of its steps but the first and the
last: each has the update and the commit of the step before, which the first has not, and the last has its own too.
Beside it stands how long the disk would take for the bytes of a step, at the rate of reads and writes at the same time
that the round has measured. Exit status 1: losses differ, or a process took more memory than it may. It needs 8 GB of
disk for `tune`, and 2 GB for `scratch`, and does not begin where less is free.
"""

import argparse
import json
import mmap
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench import RELEASE, ROOT, hardware, spread

BLOCK = 1 << 20
GB = 10**9
# What each may take of memory, what it needs of the disk, and what it is given.
SCENARIOS = {
    "scratch": (160 << 20, 2 * GB, ["--window", "256", "--batch", "8"]),
    "tune-128": (512 << 20, 8 * GB, ["--window", "128", "--batch", "1", "--rate", "1e-5"]),
    "tune-128-mixed": (512 << 20, 8 * GB, ["--window", "128", "--batch", "1", "--rate", "1e-5", "--mixed"]),
    "tune-2048": (512 << 20, 8 * GB, ["--window", "256", "--batch", "8", "--rate", "1e-5"]),
}


def mixed(folder, blocks=768, threads=8):
    """Bytes a second of direct reads and writes at the same time, in equal parts."""
    path = Path(folder) / "probe"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        buffer = mmap.mmap(-1, BLOCK)
        for block in range(2 * blocks):
            os.pwrite(handle, buffer, block * BLOCK)
        os.fsync(handle)

        def work(number):
            own = mmap.mmap(-1, BLOCK)
            for block in range(number // 2, blocks, threads // 2):
                if number % 2:
                    os.pwrite(handle, own, (blocks + block) * BLOCK)
                else:
                    os.preadv(handle, [own], block * BLOCK)

        began = time.monotonic()
        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return 2 * blocks * BLOCK / (time.monotonic() - began)
    finally:
        os.close(handle)
        path.unlink()


def check_room(names, folder):
    """Ends the program unless the disk has room: a run that finds none on its way is lost."""
    needed, name = max((SCENARIOS[name][1], name) for name in names)
    free = shutil.disk_usage(folder).free
    if free < needed:
        has = f"{folder} has {free / GB:.1f} GB free"
        sys.exit(f"bench_train: {name} needs {needed / GB:.0f} GB of disk, and {has}: choose another folder (--dir)")


def train(options, folder, steps, limit):
    """Seconds of a step, and the program's object."""
    state = Path(folder) / "state"
    command = [RELEASE / "train", *options, "--state", state, "--steps", str(steps), "--json"]
    if limit:
        command += ["--memory", str(limit)]
    done = subprocess.run(command, text=True, capture_output=True)
    shutil.rmtree(state, ignore_errors=True)
    if done.returncode:
        sys.exit(f"bench_train: {' '.join(map(str, command))} failed: {done.stderr[-500:]}")
    speeds = [float(found) for found in re.findall(r"([\d.]+) tokens/s", done.stderr)]
    window, batch = (int(options[options.index(name) + 1]) for name in ("--window", "--batch"))
    return statistics.median(window * batch / speed for speed in speeds[1:-1]), json.loads(done.stdout.splitlines()[-1])


def scenario(name, arguments, text, folder):
    limit, _, options = SCENARIOS[name]
    options = ["--text", text, *options]
    if name.startswith("tune"):
        options += ["--model", arguments.model]
    seconds = {"in core": [], "within": []}
    peaks, ratios, bounds, disk, hashes, ok = [], [], [], [], set(), True
    for _ in range(arguments.rounds):
        rate = mixed(folder)
        of_round = {}
        for side, most in (("in core", None), ("within", limit)):
            of_round[side], report = train(options, folder, arguments.steps, most)
            seconds[side].append(of_round[side])
            hashes.add(report["losses_xxh3"])
            if most:
                peaks.append(report["peak_rss_bytes"])
                ok &= report["peak_rss_bytes"] <= most
                # Also those of new parameters, or of the import: a few steps are more.
                moved = (report["disk_read_bytes"] + report["disk_written_bytes"]) / arguments.steps
        ratios.append(of_round["within"] / of_round["in core"])
        disk.append(moved / rate)
        bounds.append(of_round["within"] / max(of_round["in core"], moved / rate))
    ok &= len(hashes) == 1
    return {
        "scenario": name,
        "limit_bytes": limit,
        "peak_bytes": max(peaks),
        "same_losses": len(hashes) == 1,
        "step_in_core_s": spread(seconds["in core"]),
        "step_s": spread(seconds["within"]),
        "of_in_core": spread(ratios),
        "disk_s": spread(disk),
        "of_the_slower": spread(bounds),
        "ok": ok,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(SCENARIOS)}; all unless named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dir", default=ROOT / "target", help="where states and the probe lie")
    parser.add_argument("--model", default=ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.scenarios or list(SCENARIOS)
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown or arguments.rounds < 1 or arguments.steps < 3:
        parser.error(f"no scenario {unknown[0]}" if unknown else "at least one round of three steps")
    check_room(names, arguments.dir)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        text = Path(folder) / "text"
        files = sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "runtime").rglob("*.rs"))
        text.write_bytes(b"".join(file.read_bytes() for file in files))
        found = [scenario(name, arguments, text, folder) for name in names]
    if arguments.json:
        print(json.dumps({"hardware": hardware(arguments.dir), "scenarios": found}))
    else:
        print("| | limit | most resident | a step in core | within | of in core | the disk's part | of the slower |")
        print("|---|---|---|---|---|---|---|---|")
        for row in found:
            def of(key, row=row, unit=""):
                return "{median:.2f}{unit} [{min:.2f} - {max:.2f}]".format(unit=unit, **row[key])

            mib = [f"{row[key] / 2**20:.0f} MiB" for key in ("limit_bytes", "peak_bytes")]
            cells = [row["scenario"], *mib, of("step_in_core_s", unit=" s"), of("step_s", unit=" s"), of("of_in_core")]
            print("|", " | ".join([*cells, of("disk_s", unit=" s"), of("of_the_slower")]), "|")
    sys.exit(0 if all(row["ok"] for row in found) else 1)


if __name__ == "__main__":
    main()
