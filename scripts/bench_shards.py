#!/usr/bin/env python3
"""The same model in one file, in 4 and in 16, under `outcore run`: hit ratio, bytes read, and speed.

    bench_shards.py [--rounds N] [--only TEXT] [--models DIR]

Each program runs in a memory cgroup that counts the page cache too, with caches dropped before each run. Rounds of the
sides are interleaved, and ratios are taken round by round, to one file of the same round. Programs: llama.cpp on split
GGUF (benches/compare/llama_cpp.c, built by `make peers`), numpy over safetensors in a strict cycle of layers, and a
sequential read of each file. Prints a table in Markdown, and its figures as one line of JSON behind it. Exit status 1:
a run failed, or made other results than with one file. Models that are missing are made, and stay.

Where llama.cpp, userfaultfd or memory cgroups are not to be had, it says so on standard error, and is no failure.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

from bench import PEER, RELEASE, ROOT, SKIPPED, hardware, last_json, run
from bench_mapped import MIXTURE, PROMPT, SEED, UNITS, can_run, spread, tell

PYTHON = PEER.parent / "python"
FILES = (1, 4, 16)
LAYERS, MATRIX = 48, 12 << 20

# Goes over the shards' layers in turn, or over their bytes in turn, and prints a sum and how long a pass takes.
NUMPY = """
import json, sys, time
import numpy
files, passes, by = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
places, size = [], 0
for path in files:
    data = numpy.memmap(path, mode="r")
    end = 8 + int(data[:8].view("<u8")[0])
    for name, tensor in json.loads(bytes(data[8:end])).items():
        start, stop = tensor["data_offsets"]
        places.append((int(name.split(".")[2]), path, data[end + start:end + stop]))
if by == "layers":
    places.sort(key=lambda place: place[0])
total, times = 0, []
for _ in range(passes):
    begun = time.perf_counter()
    total += sum(int(data[::512].sum(dtype="u8")) for _, _, data in places)
    times.append(time.perf_counter() - begun)
print(json.dumps({"sum": total, "times": times}))
"""


def split(model, folder, files):
    """The files of a GGUF model, the first one first."""
    if files == 1:
        return [model]
    names = [folder / f"{model.stem}-{n:05}-of-{files:05}.gguf" for n in range(1, files + 1)]
    if not all(name.exists() for name in names):
        tell(f"splitting {model} into {files} files")
        done = run([PYTHON, ROOT / "benches/compare/split_gguf.py", model, folder, files])
        if done.returncode:
            sys.exit(f"bench_shards: {model} was not split: {done.stderr.strip()[-500:]}")
    return names


def safetensors(folder, files):
    """A model of layers with a matrix each, in so many files."""
    stem = f"layers{files}"
    names = [folder / f"{stem}-{n:05}-of-{files:05}.safetensors" for n in range(1, files + 1)]
    if files == 1:
        names = [folder / f"{stem}.safetensors"]
    if all(name.exists() for name in names):
        return names
    folder.mkdir(parents=True, exist_ok=True)
    chunk = random.Random(1).randbytes((1 << 20) - 2)
    # As `save_file` sorts them: layer 10 comes before layer 2.
    layers = sorted(range(LAYERS), key=str)
    each = -(-LAYERS // files)
    for at, name in enumerate(names):
        header, end = {}, 0
        for layer in layers[at * each : (at + 1) * each]:
            header[f"model.layers.{layer}.mlp.up_proj.weight"] = {
                "dtype": "U8", "shape": [MATRIX], "data_offsets": [end, end + MATRIX],
            }
            end += MATRIX
        text = json.dumps(header).encode()
        with open(name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for layer in layers[at * each : (at + 1) * each]:
                for mib in range(MATRIX >> 20):
                    file.write(bytes([layer, mib]) + chunk)
    return names


def once(command, limit, budget):
    """One run: what it printed as JSON, and what `outcore run` said at the end."""
    command = [RELEASE / "outcore", "run", "--no-kept-order", "--budget", f"{budget}MiB", "--", *command]
    command = [ROOT / "scripts/cgroup_run.sh", "--drop-caches", f"{limit}MiB", *command]
    done = run(command, env={key: value for key, value in os.environ.items() if not key.startswith("OUTCORE_RUN_")})
    if done.returncode == SKIPPED:
        return {"skipped": done.stderr.strip().splitlines()[-1]}
    found = last_json(done.stdout)
    if done.returncode or found is None:
        return {"failed": f"status {done.returncode}: {done.stderr.strip()[-500:]}"}
    read = re.search(r"([0-9.]+) ?([KMGT]?i?B) read", done.stderr)
    hits = re.search(r"hit ratio ([0-9.]+)", done.stderr)
    order = re.search(r"^outcore: (The order of use.*)$", done.stderr, re.M)
    if not read or not hits:
        return {"failed": f"nothing was mapped: {done.stderr.strip()[-500:]}"}
    read = float(read.group(1)) * UNITS[read.group(2)]
    return {**found, "read": read, "hits": float(hits.group(1)), "order": order.group(1) if order else ""}


class Case:
    """A program over a model in each number of files; `result` and `speed` of what it printed."""

    def __init__(self, name, limit, budget, commands, result, speed):
        self.name, self.limit, self.budget, self.commands = name, limit, budget, commands
        self.result, self.speed = result, speed


def cases(folder, only):
    def llama(name, model, tokens, limit, budget, seed=None):
        def command(files):
            last = [seed] if seed else []
            return [PEER, split(model, folder, files)[0], PROMPT, tokens, os.cpu_count(), *last]

        return Case(name, limit, budget, command, lambda found: found["tokens"], lambda found: found["decode_tok_s"])

    def numpy(name, by, passes, limit, budget):
        def command(files):
            return [PYTHON, "-c", NUMPY, ",".join(map(str, safetensors(folder, files))), passes, by]

        speed = lambda found: 1 / statistics.median(found["times"][len(found["times"]) // 2 :])
        return Case(name, limit, budget, command, lambda found: found["sum"], speed)

    all_cases = [
        llama("llama.cpp, 1.2 GB Q8_0", folder / "q8.gguf", 24, 700, 630),
        llama("llama.cpp, 4 GB mixture", folder / "moe.gguf", 48, 2000, 1850, SEED),
        numpy("numpy, 576 MiB in a cycle of layers", "layers", 8, 450, 300),
        numpy("numpy, 576 MiB once, by offset", "offset", 1, 450, 300),
    ]
    return [case for case in all_cases if only in case.name]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", default="", help="cases whose name has this text")
    options.add_argument("--models", type=Path, default=RELEASE.parent / "bench-models", help="where models are made")
    options = options.parse_args()
    if not can_run():
        return
    folder = options.models
    folder.mkdir(parents=True, exist_ok=True)
    for name, made_by in [("q8.gguf", []), ("moe.gguf", MIXTURE)]:
        if not (folder / name).exists():
            tell(f"making {folder / name}")
            subprocess.run([RELEASE / "make_model", folder / name, *made_by], check=True, stdout=subprocess.DEVNULL)
    wrong, lines, figures = [], [], []
    for case in cases(folder, options.only):
        commands = {files: case.commands(files) for files in FILES}
        found = {files: [] for files in FILES}
        for number in range(options.rounds):
            for files in FILES:
                got = once(commands[files], case.limit, case.budget)
                if "skipped" in got:
                    tell(f"SKIPPED {case.name}: {got['skipped']}")
                    return
                if "failed" in got:
                    wrong.append(f"{case.name}, {files} files: {got['failed']}")
                    continue
                tell(f"round {number + 1}: {case.name}, {files} files: {case.speed(got):.3f}, hits {got['hits']:.2f}")
                found[files].append(got)
        for files, runs in found.items():
            if not runs:
                continue
            if any(case.result(got) != case.result(found[1][0]) for got in runs):
                wrong.append(f"{case.name}, {files} files: other results than with one file")
            hits, read = [got["hits"] for got in runs], [got["read"] / 1e9 for got in runs]
            ratios = [case.speed(a) / case.speed(b) for a, b in zip(runs, found[1])] if files > 1 else [1.0]
            speed = spread([case.speed(got) for got in runs])
            lines.append(
                f"| {case.name} | {files} | {spread(hits)} | {spread(read)} | {speed} | {spread(ratios)} | {runs[0]['order']} |"
            )
            figures.append({"case": case.name, "files": files, "hits": hits, "read_gb": read, "speed_ratio": ratios})
    machine = hardware(folder)
    print(machine, "", sep="\n")
    print("| program | files | hit ratio | GB read | passes or tokens a second | of one file's | order |")
    print("|---|---|---|---|---|---|---|", *lines, sep="\n", flush=True)
    print(json.dumps({"hardware": machine, "rows": figures, "wrong": wrong}))
    for what in wrong:
        tell(f"WRONG: {what}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
