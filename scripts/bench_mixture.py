#!/usr/bin/env python3
"""A mixture of experts of twice its memory, served to 1, 16 and 64 clients: by `serve`, by llama.cpp's server under
`outcore run`, and by that server alone; beside what the disk and a replay of the same uses allow.

    bench_mixture.py [--rounds N] [--clients 1,16,64] [--models DIR] [--out STEM]

Each server is started for each round in a memory cgroup that counts the page cache, which was dropped. Sides of a round
follow each other, with the same prompts. Clients sample nothing: prompts differ, and answers are greedy.

`serve` writes a capture of its uses of pages, which `outcore policies` replays with the room that `serve` has while it
writes answers; while it reads prompts it has less. The disk's rate is
measured in each round, with as many busy threads beside it as compute. `of the bound` is (bytes that lfu misses / that
rate) over the seconds of passes, and `of lfu's bytes` is what was read over what lfu misses. Both are of the load
alone: memory is full when it begins, and what lfu misses of the capture's beginning is left out.

Prints a table in Markdown, and with `--out` writes it into STEM.md and its figures into STEM.json.
"""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from bench import PEER, RELEASE, hardware, last_json, probe, run, spread
from bench_mapped import MIXTURE, Model, make
from bench_serve import LLAMA, SERVE, Load, Server, Side, ask, run_load, show, tell, warm

LIMIT = 2097  # MB: 2000 MiB
BUDGET = "1850MiB"
PROMPT = 16
# The plain server takes seconds a token.
TOKENS = {"serve": 32, "outcore run": 16, "llama-server": 5}
PAGE = 256 << 10


def templates(capture):
    llama = f"{LLAMA} --no-warmup"
    sides = {
        "serve": f"{SERVE} --context 512 --capture {capture}",
        "outcore run": f"{RELEASE}/outcore run --budget {BUDGET} -- {llama}",
        "llama-server": llama,
    }
    return sides if PEER.with_name("llama-server").exists() else {"serve": sides["serve"]}


def metrics(port):
    lines = ask(port, "/metrics")[1].decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {re.sub(r"\{\}$", "", name): float(value) for name, value in pairs}


def disk_beside_computing(file):
    """Bytes a second of reads of a page's size at the best depth, while each processor has a thread that computes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    try:
        return probe(file, PAGE)[0]
    finally:
        for one in busy:
            one.kill()
            one.wait()


def varints(raw, at):
    while at < len(raw):
        value = shift = 0
        while True:
            byte = raw[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                break
        yield value, at


def beginning(capture, passes):
    """A capture of the first passes alone (docs/trace-format.md)."""
    data = capture.read_bytes()
    raw = zlib.decompress(data[12:], wbits=31)
    items = varints(raw, 0)
    length, start = next(items)
    items, uses, end = varints(raw, start + length), 0, start + length
    while passes:
        value, end = next(items)
        if value:
            uses += 1
            continue
        mark, end = next(items)
        if mark not in [1, 3]:
            raise ValueError(f"mark {mark} of {capture} is not expected here")
        passes -= mark == 1
    tail = bytearray([0, 2])
    while uses > 127:
        tail.append(uses & 127 | 128)
        uses >>= 7
    tail.append(uses)
    found = capture.with_suffix(".beginning")
    found.write_bytes(data[:12] + gzip.compress(raw[:end] + tail, 1))
    return found


def replayed(capture, frames):
    """Bytes that lfu and the optimum miss of what was captured."""
    command = [RELEASE / "outcore", "policies", "--trace", capture, "--capacity", str(frames), "--json"]
    done = run([*command, "--policy", "lfu"])
    [room] = json.loads(done.stdout)["capacities"]
    return room["policies"][0]["bytes_moved"], room["optimum"]["bytes_moved"]


def one(name, template, model, clients, number, capture):
    load = Load(clients, PROMPT, TOKENS[name])
    server = Server(template, model.file, Side(name, name, load), LIMIT)

    def so_far():
        said = metrics(server.port)
        read = int(re.search(r"^read_bytes: (\d+)", Path(f"/proc/{server.pid()}/io").read_text(), re.M)[1])
        names = ["outcore_passes_total", "outcore_pass_seconds_sum", "outcore_device_budget_bytes"]
        return [read, *(said[name] for name in names)]

    try:
        warm(server, load)
        if name == "serve":
            run_load(server.port, server.model, Load(clients, PROMPT, 8), f"before {clients} {number}")
            before = so_far()
        got = run_load(server.port, server.model, load, f"mixture {clients} {number}", server.pid())
        if name == "serve":
            after = so_far()
            got["read"], got["passes"], got["pass_s"] = (b - a for a, b in zip(before, after[:3]))
            got["frames"] = int(min(before[3], after[3])) // PAGE
    finally:
        peak = server.end()
    got["peak"] = peak
    if name == "serve":
        first = replayed(beginning(capture, int(before[1])), got["frames"])
        all_of_it = replayed(capture, got["frames"])
        got["lfu"], got["optimum"] = (b - a for a, b in zip(first, all_of_it))
        disk = got["disk"] = disk_beside_computing(model.file)
        got["of_bound"] = got["lfu"] / disk / got["pass_s"]
        got["of_lfu"], got["of_optimum"] = got["read"] / got["lfu"], got["read"] / got["optimum"]
        got["of_disk"] = got["read"] / disk / got["pass_s"]
    return got


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--clients", default="1,16,64")
    options.add_argument("--models", type=Path, default=RELEASE.parent / "bench-models")
    options.add_argument("--out", type=Path)
    options = options.parse_args()
    model = Model("4 GB mixture, 4 of 64 experts", options.models / "moe.gguf", 0, made_by=MIXTURE)
    if not make(model):
        return
    clients = [int(count) for count in options.clients.split(",")]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder) / "capture"
        for number in range(options.rounds):
            for count in clients:
                for name, template in templates(capture).items():
                    if name == "outcore run" and count > 1:
                        continue  # what is left beside its budget holds one sequence of the server
                    got = one(name, template, model, count, number, capture)
                    shown = {key: round(value, 3) for key, value in got.items() if isinstance(value, float)}
                    tell(f"round {number + 1}, {count} clients, {name}: {got['errors']} errors, {json.dumps(shown)}")
                    found.setdefault(count, {}).setdefault(name, []).append(got)
    h = hardware(options.models)
    lines = [
        f"{h['cores']} x {h['cpu']}, {h['memory_gib']} GiB, Linux {h['kernel']}, {h['filesystem']};"
        f" commit {h['commit']}, {h['date']}. Medians with [least - most] of {options.rounds} rounds, interleaved.",
        "",
        "| clients | side | tokens/s while all decode | serve is so many times | read a pass MB | of lfu's bytes | disk"
        " GB/s | of the disk's rate | of the bound | peak MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def rate(got):
        return got.get("decode_tok_s") or got["tok_s"]

    for count, sides in found.items():
        for name, rounds in sides.items():
            ratios = [rate(ours) / rate(theirs) for ours, theirs in zip(sides["serve"], rounds)]

            def of(key, scale=1.0, digits=2, rounds=rounds):
                return show(spread([got[key] for got in rounds]), scale, digits) if key in rounds[0] else ""

            for got in rounds:
                if "passes" in got:
                    got["pass_read"] = got["read"] / got["passes"]
            cells = [show(spread([rate(got) for got in rounds])), "" if name == "serve" else show(spread(ratios))]
            cells += [of("pass_read", 1e-6, 0), of("of_lfu"), of("disk", 1e-9), of("of_disk"), of("of_bound")]
            peak = max((got["peak"] or 0 for got in rounds), default=0) / 1e6
            lines.append(f"| {count} | {name} | {' | '.join(cells)} | {peak:.0f} |")
    if {1, 64} <= found.keys():
        times = [rate(many) / rate(few) for few, many in zip(found[1]["serve"], found[64]["serve"])]
        lines += ["", f"`serve` with 64 clients over one: {show(spread(times), 1, 2)} times."]
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.with_suffix(".md").write_text(text + "\n")
        options.out.with_suffix(".json").write_text(json.dumps({"hardware": h, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
