#!/usr/bin/env python3
"""`outcore run` beside plain `mmap`: llama.cpp in memory cgroups, with and without it.

    bench_mapped.py [--rounds N] [--tokens N] [--only TEXT] [--models DIR]

Both sides are the same program (benches/compare/llama_cpp.c, built by `make peers`) on the same file, prompt and seed,
in a memory cgroup of the same size, which counts the page cache too; caches are dropped before each run. Rounds of the
sides are interleaved, and ratios are taken round by round. Prints a table in Markdown, and its figures as one line of
JSON behind it. Exit status 1: a run failed, made other tokens than the others, or took over a file that it should have
left alone. Models that are missing are made, 5.2 GB in all, and stay.

Where llama.cpp, userfaultfd or memory cgroups are not to be had, it says so on standard error, and is no failure.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from bench import PEER, RELEASE, ROOT, SKIPPED, hardware, last_json, probe, run, same_ids

PROMPT = "1,5,9,200,33"
# A prompt that draws nearly all experts of a mixture: its pass is one read of the file, if nothing is read twice.
LONG_PROMPT = ",".join(str(5 + 97 * n * n % 31990) for n in range(256))
PAGE = 2 << 20
MIB = 1 << 20
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MIXTURE = ["--layers", "24", "--dim", "1024", "--heads", "16", "--kv-heads", "4", "--ffn", "768", "--vocab", "32000"]
MIXTURE += ["--experts", "64", "--experts-used", "4"]
# Greedy words of a model with random weights fall into a loop, which uses few experts: a mixture's are drawn.
SEED = "7"


class Model:
    def __init__(self, name, file, tokens, made_by=None, seed=None):
        self.name, self.file, self.tokens, self.made_by, self.seed = name, file, tokens, made_by, seed


# A cgroup's limit and the budget for pages, in MiB. The rest is the program's own memory.
class Case:
    def __init__(self, model, limit, budget, plain_tokens, fits=False, without_routing=False):
        self.model, self.limit, self.budget, self.fits = model, limit, budget, fits
        self.plain_tokens, self.without_routing = plain_tokens, without_routing


def cases(folder):
    small = Model("SmolLM2-135M Q4_1", ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf", 64)
    dense = Model("1.2 GB Q8_0, synthetic", folder / "q8.gguf", 24, made_by=[])
    mixture = Model("4 GB mixture, 4 of 64 experts", folder / "moe.gguf", 64, made_by=MIXTURE, seed=SEED)
    return [
        Case(small, 110, 68, 24),
        Case(small, 130, 97, 64, fits=True),
        Case(dense, 1000, 930, 10),
        Case(dense, 700, 630, 10),
        Case(mixture, 2000, 1850, 12, without_routing=True),
        Case(mixture, 1000, 880, 12, without_routing=True),
    ]


def tell(text):
    print(f"bench_mapped: {text}", file=sys.stderr, flush=True)


def make(model):
    """Whether the model's file is there. What can be made is made, under another name until it is whole."""
    if model.file.exists():
        return True
    if model.made_by is None:
        fetched = run([ROOT / "scripts/fetch_model.sh"])
        if fetched.returncode:
            tell(f"SKIPPED {model.name}: {fetched.stderr.strip()}")
        return model.file.exists()
    tell(f"making {model.file}")
    model.file.parent.mkdir(parents=True, exist_ok=True)
    part = model.file.with_suffix(".part")
    subprocess.run([RELEASE / "make_model", part, *model.made_by], check=True, stdout=sys.stderr)
    part.rename(model.file)
    return True


def once(model, tokens, limit=None, budget=None, routing=True, prompt=PROMPT):
    """One run of llama.cpp: its figures, or the reason why there are none."""
    command = [PEER, model.file, prompt, tokens, os.cpu_count(), *([model.seed] if model.seed else [])]
    if budget:
        command = [RELEASE / "outcore", "run", "--budget", f"{budget}MiB", "--", *command]
    if limit:
        command = [ROOT / "scripts/cgroup_run.sh", "--drop-caches", f"{limit}MiB", *command]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OUTCORE_RUN_")}
    environment.update({} if routing else {"OUTCORE_RUN_ROUTING": "off"})
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
    done = run(command, env=environment)
    read = (resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - before) * 512
    if done.returncode == SKIPPED and limit:
        return {"skipped": done.stderr.strip().splitlines()[-1]}
    found = last_json(done.stdout)
    if done.returncode or found is None:
        return {"failed": f"status {done.returncode}: {done.stderr.strip()[-500:]}"}
    # Said by the preloaded library when the program ends. A file that it left alone is said nothing of.
    said = re.search(r"^outcore: (\d+) file.*?([0-9.]+) ?([KMGT]?i?B) read", done.stderr, re.M)
    taken = bool(said and int(said.group(1)))
    if taken:
        read = float(said.group(2)) * UNITS[said.group(3)]
    peak = re.search(r"cgroup_run: .*?\bpeak=(\d+)", done.stderr)
    return {
        "tok_s": found["decode_tok_s"],
        "pass_s": found["pass_s_median"],
        "first_s": found["ttft_s"],
        "read": read,
        "tokens": found["tokens"],
        "read_a_token": read / len(found["tokens"]),
        "peak": int(peak.group(1)) if peak else None,
        "taken": taken,
    }


def under_run(command, limit, budget):
    """A run under `outcore run`, which keeps no order, in a memory cgroup, with caches dropped."""
    command = [RELEASE / "outcore", "run", "--no-kept-order", "--budget", f"{budget}MiB", "--", *command]
    command = [ROOT / "scripts/cgroup_run.sh", "--drop-caches", f"{limit}MiB", *command]
    return run(command, env={key: value for key, value in os.environ.items() if not key.startswith("OUTCORE_RUN_")})


def sides_of(case, tokens):
    """The name of each side, and how it is run."""
    here = {"limit": case.limit, "budget": case.budget}
    sides = {"plain": lambda: once(case.model, tokens or case.plain_tokens, case.limit)}
    sides["outcore run"] = lambda: once(case.model, tokens or case.model.tokens, **here)
    if case.without_routing:
        sides["outcore run, faults alone"] = lambda: once(case.model, tokens or case.model.tokens, **here, routing=False)
    return sides


def measure(case, rounds, tokens, wrong):
    """Runs of each side of a case by its name; `None` if no cgroup can be made."""
    found = {}
    for number in range(rounds):
        for name, side in sides_of(case, tokens).items():
            where = f"{case.model.name}, {case.limit} MiB, {name}"
            got = side()
            if "skipped" in got:
                tell(f"SKIPPED {where}: {got['skipped']}")
                return None
            if "failed" in got:
                tell(f"FAILED {where}: {got['failed']}")
                wrong.append(f"{where} failed")
                continue
            if name != "plain" and got["taken"] == case.fits:
                wrong.append(f"{where}: the file was {'taken over' if case.fits else 'left to the kernel'}")
            tell(f"round {number + 1}: {where}: {got['tok_s']:.2f} tok/s")
            found.setdefault(name, []).append(got)
    return found


def read_all(path):
    """Brings the file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def in_core(model, rounds, tokens, wrong):
    """Without a limit, warm: what the machine can do."""
    read_all(model.file)
    found = []
    for _ in range(rounds):
        got = once(model, tokens or model.tokens)
        if "failed" in got:
            wrong.append(f"{model.name}, in core: {got['failed']}")
        else:
            tell(f"{model.name}, in core: {got['tok_s']:.2f} tok/s")
            found.append(got)
    return found


def spread(values, digits=2):
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} - {max(values):.{digits}f}]"


def row(model, where, side, runs, plain, core):
    rates = [got["tok_s"] for got in runs]
    ratios = [got["tok_s"] / other["tok_s"] for got, other in zip(runs, plain)]
    peaks = [got["peak"] for got in runs if got["peak"]]
    return {
        "model": model,
        "where": where,
        "side": side,
        "tok_s": rates,
        "of_plain": ratios,
        "pass_ms": statistics.median(got["pass_s"] for got in runs) * 1e3,
        "of_in_core": statistics.median(rates) / statistics.median(got["tok_s"] for got in core) if core else None,
        "mb_a_token": statistics.median(got["read_a_token"] for got in runs) / 1e6,
        "peak_mib": max(peaks) / MIB if peaks else None,
    }


def table(rows, machine, disk, same):
    lines = [
        f"{machine['cores']} x {machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']},"
        f" {machine['filesystem']}; disk: {disk / 1e6:.0f} MB/s (`outcore probe`, pages of 2 MiB); load"
        f" {machine['load_before']:.1f} before the run; commit {machine['commit']}, {machine['date']}. Medians with"
        f" [least - most].",
        "",
        "| model | where | | tok/s | median pass, ms | times plain | of in core | MB read a token | peak of the cgroup |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        times = spread(one["of_plain"]) if one["of_plain"] else ""
        of_core = f"{one['of_in_core']:.2f}" if one["of_in_core"] else ""
        peak = f"{one['peak_mib']:.0f} MiB" if one["peak_mib"] else ""
        lines.append(
            f"| {one['model']} | {one['where']} | {one['side']} | {spread(one['tok_s'])} |"
            f" {one['pass_ms']:.1f} | {times} | {of_core} |"
            f" {one['mb_a_token']:.1f} | {peak} |"
        )
    lines += [
        "",
        "Bytes a token are those of the whole run, so that loading and the prompt count too: what `outcore run` says at"
        " its end, or what the kernel counts for the process. Plain runs make fewer tokens.",
        f"The same tokens in all runs of a model, as far as the shorter one goes: {'yes' if same else 'NO'}.",
    ]
    return "\n".join(lines)


def prefill(case, rounds, disk, wrong):
    """A long prompt of a mixture: lines of a table of how long its pass takes, beside one read of the file."""
    sides = {
        "in core, warm": {},
        "plain": {"limit": case.limit},
        "outcore run": {"limit": case.limit, "budget": case.budget},
    }
    found = {name: [] for name in sides}
    for number in range(rounds):
        for name, where in sides.items():
            if name == "in core, warm":
                read_all(case.model.file)
            # Of two tokens the first comes from the prompt.
            got = once(case.model, 2, **where, prompt=LONG_PROMPT)
            if "skipped" in got or "failed" in got:
                wrong.append(f"prompt of 256 tokens, {case.limit} MiB, {name}: {got}")
                return []
            tell(f"round {number + 1}: prompt of 256 tokens, {case.limit} MiB, {name}: {got['first_s']:.2f} s")
            found[name].append(got)
    once_read = case.model.file.stat().st_size / disk
    lines = []
    for name, runs in found.items():
        times, read = [got["first_s"] for got in runs], statistics.median(got["read"] for got in runs) / 1e9
        part = once_read / statistics.median(times)
        lines.append(f"| {case.limit} MiB | {name} | {spread(times)} | {part:.2f} | {read:.2f} |")
    return lines


def can_run():
    if not PEER.exists():
        tell("WARNING: llama.cpp is ABSENT, so `outcore run` is not measured; `make peers` builds it")
        return False
    for needed in ["outcore", "liboutcore_preload.so", "make_model"]:
        if not (RELEASE / needed).exists():
            sys.exit(f"bench_mapped: {RELEASE / needed} is not there; scripts/bench.sh builds it")
    tried = run([RELEASE / "outcore", "run", "--budget", "1GiB", "--", "true"])
    if tried.returncode:
        tell(f"WARNING: `outcore run` cannot run here, so it is not measured: {tried.stderr.strip()}")
        return False
    return True


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--tokens", type=int, help="as many in each run, instead of a number for each case")
    options.add_argument("--only", default="", help="cases whose name, `MODEL, LIMIT MiB`, has this text")
    options.add_argument("--models", type=Path, default=RELEASE.parent / "bench-models", help="where models are made")
    options = options.parse_args()
    if options.rounds < 1 or (options.tokens is not None and options.tokens < 2):
        sys.exit("bench_mapped: at least one round, and two tokens: the first is not counted")
    if not can_run():
        return
    chosen = [case for case in cases(options.models) if options.only in f"{case.model.name}, {case.limit} MiB"]
    chosen = [case for case in chosen if make(case.model)]
    if not chosen:
        sys.exit(f"bench_mapped: no case to measure is named `{options.only}`")
    machine, wrong, rows, made = hardware(options.models), [], [], {}
    disk = probe(max((case.model.file for case in chosen), key=lambda file: file.stat().st_size), PAGE)[0]
    cores = {}
    for case in chosen:
        model = case.model
        if model.name not in cores:
            core = cores[model.name] = in_core(model, options.rounds, options.tokens, wrong)
            made.setdefault(model.name, []).extend(got["tokens"] for got in core)
            if core:
                rows.append(row(model.name, "in core, warm", "plain", core, [], core))
        found = measure(case, options.rounds, options.tokens, wrong) or {}
        for side, runs in found.items():
            # Round by round, which takes that none of them failed.
            plain = found.get("plain", []) if side != "plain" else []
            plain = plain if len(plain) == len(runs) else []
            rows.append(row("", f"{case.limit} MiB, budget {case.budget} MiB", side, runs, plain, cores[model.name]))
            made.setdefault(model.name, []).extend(got["tokens"] for got in runs)
    same = True
    for name, all_runs in made.items():
        longest = max(all_runs, key=len, default=[])
        if any(same_ids(longest, tokens) < len(tokens) for tokens in all_runs):
            same = False
            wrong.append(f"{name}: not all runs made the same tokens")
    print(table(rows, machine, disk, same), flush=True)
    prompts = [line for case in chosen if case.model.seed for line in prefill(case, options.rounds, disk, wrong)]
    if prompts:
        print("\n| a prompt of 256 tokens | | s | one read of the file, of that | GB read, with the second token |")
        print("|---|---|---|---|---|", *prompts, sep="\n", flush=True)
    print(json.dumps({"hardware": machine, "disk_bytes_s": disk, "rows": rows, "same_tokens": same, "wrong": wrong}))
    for what in wrong:
        tell(f"WRONG: {what}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
