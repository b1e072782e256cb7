#!/usr/bin/env python3
"""Runs the measurements and writes docs/results/DATE-HOST.json and .md. Called by bench.sh, which builds first.

Absolute times of a shared machine mean little, so each figure stands beside a ceiling of the same run: rounds of the
sides are interleaved, and the ratio is taken round by round.
"""

import datetime
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
QUICK = bool(os.environ.get("BENCH_QUICK"))
ROUNDS = 2 if QUICK else 5
# A small model takes more tokens, so that a run is seconds long.
TOKENS = 12 if QUICK else 24
PROMPT = "1,5,9,200,33"
BENCHES = ["pin", "crowd", "fault", "stats", "mapped", "policies", "shares", "simulate", "cuda_move", "overlap", "open", "disk_to_device", "read_write", "optimizer", "first_page", "walkers", "demand_latency", "verify", "kernels"]
# Benches of other packages than the repository's own.
ELSEWHERE = {"kernels": "outcore-llm"}
SKIPPED = 77
PEER = Path(os.environ.get("OUTCORE_PEERS", ROOT / ".venv")) / "bin/llama-peer"
GGML = PEER.with_name("ggml-peer")
FIO = shutil.which("fio")


def run(command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)


def last_json(text):
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return None


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}


def hardware(folder):
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemTotal"))
    disk = run(["findmnt", "-n", "-o", "FSTYPE", "-T", folder]).stdout.strip() or "?"
    commit = run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "filesystem": disk,
        "load_before": os.getloadavg()[0],
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def cargo_bench(name):
    package = ["-p", ELSEWHERE[name]] if name in ELSEWHERE else []
    given = ["--", GGML] if name == "kernels" and GGML.exists() else []
    done = run(["cargo", "bench", *package, "--bench", name, *given], cwd=ROOT)
    print(done.stdout, end="", flush=True)
    found = last_json(done.stdout)
    if done.returncode or found is None:
        print(done.stderr[-2000:], file=sys.stderr)
        return {"failed": done.returncode}
    return found


def generate(model, tokens, arguments, cap=None):
    command = [RELEASE / "generate", "--model", model, "--tokens", tokens, "--json", *arguments]
    if cap:
        command = [ROOT / "scripts/cgroup_run.sh", "--drop-caches", cap, *command]
    done = run(command)
    if done.returncode == SKIPPED:
        return None
    found = last_json(done.stdout)
    if found is None:
        sys.exit(f"bench: generate failed on {model} at {cap}: {done.stderr[-500:]}")
    return found


def peer(model, tokens, prompt, cap=None, more=()):
    """llama.cpp on the same prompt and as many threads, under the same cap; None where it cannot run there."""
    command = [PEER, model, prompt, tokens, os.cpu_count(), *more]
    if cap:
        command = [ROOT / "scripts/cgroup_run.sh", "--drop-caches", cap, *command]
    done = run(command)
    found = last_json(done.stdout)
    if found is None:
        print(f"bench: llama.cpp failed on {model} at {cap or 'no cap'}: {done.stderr[-500:]}", file=sys.stderr)
    return found


def plain(model, tokens, prompt):
    done = run([RELEASE / "llm-bench", model, "--ids", prompt, "--tokens", tokens])
    found = re.search(r"median ([0-9.]+)\)", done.stdout)
    if not found:
        sys.exit(f"bench: llm-bench failed on {model}: {done.stderr[-500:]}")
    return float(found.group(1))


def probe(file, page):
    done = run([RELEASE / "outcore", "probe", "--file", file, "--json", "--page-size", str(page)])
    found = last_json(done.stdout)
    points = [point for point in found["points"] if point["block_bytes"] == page]
    best = max(points, key=lambda point: point["bytes_per_second"])
    return best["bytes_per_second"], best["depth"]


def fio(file, page, depth):
    """The rate of fio's io_uring engine on the same file, with the block and the depth at which the probe was best."""
    command = [FIO, "--name=probe", f"--filename={file}", "--readonly", "--rw=read", "--direct=1", "--ioengine=io_uring"]
    command += [f"--bs={page}", f"--iodepth={depth}", "--io_size=1g", "--output-format=json"]
    # The probe and the runtime do the same.
    command += ["--fixedbufs=1", "--registerfiles=1"]
    done = run(command)
    if done.returncode:
        print(f"bench: fio failed on {file}: {done.stderr[-500:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"]


def conversations(path, turns):
    """A made-up trace of requests: conversations that begin alike, go on by turns, and leave their last block behind."""
    draw, fresh, going = random.Random(1), 1000, []
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(turns):
            if not going or draw.random() < 0.3:
                blocks = list(range(1 + int(draw.paretovariate(1.2)) % 16))
            else:
                blocks = going.pop(-1 - min(int(draw.expovariate(1 / 150)), len(going) - 1))[:-1]
            more = 1 + int(draw.expovariate(1 / 8))
            blocks += range(fresh, fresh + more)
            fresh += more
            going.append(blocks)
            file.write(json.dumps({"hash_ids": blocks}) + "\n")


def libcachesim(folder):
    """Our policies' hit ratios beside libCacheSim's, which may be half a point apart."""
    python = PEER.parent / "python"
    if run([python, "-c", "import libcachesim"]).returncode if python.exists() else True:
        print("bench: WARNING: libCacheSim is ABSENT, so policies are not compared with it; `make peers` fetches it")
        return None
    trace = folder / "conversations.jsonl"
    conversations(trace, 4000 if QUICK else 12000)
    done = run([python, ROOT / "benches/compare/policies.py", trace, "--outcore", RELEASE / "outcore"])
    print(done.stdout, end="", flush=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return {"within_half_a_point": done.returncode == 0, "table": done.stdout}


def by_script(name, short):
    """The table and the figures of a script that measures by itself, and says itself what it skips."""
    script = [sys.executable, ROOT / "scripts" / name, *(short if QUICK else [])]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True)
    found = last_json(done.stdout)
    if found is None:
        return {"failed": done.returncode} if done.returncode else None
    text = done.stdout[: done.stdout.rindex("\n{")].strip()
    print(text, flush=True)
    return {"table": text, **found}


def outcore_run():
    """`outcore run` beside plain `mmap`."""
    return by_script("bench_mapped.py", ["--rounds", "1", "--tokens", "8"])


def shards():
    """A model in one file, in 4 and in 16, under `outcore run`."""
    return by_script("bench_shards.py", ["--rounds", "1", "--only", "numpy"])


def serve():
    """`serve` beside llama.cpp's server."""
    return by_script("bench_serve.py", ["--rounds", "1", "crowd-in-core", "streams-64"])


def same_ids(ours, theirs):
    """How many of the first ids are the same; the kernels round differently, so that some texts part."""
    return next((n for n, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def capped(name, model, tokens, caps):
    """In core on plain memory, in core paged, and at each cap, interleaved; and the disk's rate in every round."""
    size = sum(f.stat().st_size for f in ([model] if model.is_file() else model.glob("*.safetensors")))
    file = model if model.is_file() else sorted(model.glob("*.safetensors"))[0]
    keys = ["plain", "resident", "in_core_ratio", "llama_cpp", "of_llama_cpp", "same_ids", "disk_bytes_s", "fio_bytes_s"]
    sides = {key: [] for key in keys}
    at_cap = ["tok_s", "of_roofline", "hit", "opt", "rss", "llama_cpp", "of_llama_cpp"]
    sides.update({cap: {key: [] for key in at_cap} for cap in caps})
    compared = model.is_file() and PEER.exists()
    logits = set()
    for _ in range(ROUNDS):
        sides["plain"].append(plain(model, tokens, PROMPT))
        resident = generate(model, tokens, ["--prompt-tokens", PROMPT, "--device-budget", str(size + (64 << 20))])
        logits.add(resident["logits_xxh3"])
        in_core = resident["pass_s_median"]
        sides["resident"].append(1 / in_core)
        sides["in_core_ratio"].append(1 / in_core / sides["plain"][-1])
        if compared and (theirs := peer(model, tokens, PROMPT)):
            sides["llama_cpp"].append(1 / theirs["pass_s_median"])
            sides["of_llama_cpp"].append(theirs["pass_s_median"] / in_core)
            sides["same_ids"].append(same_ids(resident["tokens"], theirs["tokens"]))
        for cap in caps:
            got = generate(model, tokens, ["--prompt-tokens", PROMPT], cap)
            if got is None:
                print(f"bench: SKIPPED {name} at {cap}: no memory cgroup can be made here")
                continue
            rate, depth = probe(file, got["page_bytes"])
            sides["disk_bytes_s"].append(rate)
            if FIO and (by_fio := fio(file, got["page_bytes"], depth)):
                sides["fio_bytes_s"].append(by_fio)
            missing = max(0, got["pass_bytes"] - got["peak_device_bytes"])
            logits.add(got["logits_xxh3"])
            side = sides[cap]
            side["tok_s"].append(got["decode_tok_s"])
            side["of_roofline"].append(got["decode_tok_s"] * max(in_core, missing / rate))
            side["hit"].append(got["hit_ratio"])
            side["opt"].append(got["opt_hit_ratio"])
            side["rss"].append(got["peak_rss_bytes"])
            if compared and (theirs := peer(model, tokens, PROMPT, cap)):
                side["llama_cpp"].append(theirs["decode_tok_s"])
                side["of_llama_cpp"].append(got["decode_tok_s"] / theirs["decode_tok_s"])
    summary = {"model_bytes": size, "pass_bytes": resident["pass_bytes"], "same_logits": len(logits) == 1}
    for key, value in sides.items():
        if isinstance(value, dict):
            summary[key] = {inner: spread(values) for inner, values in value.items() if values}
        elif value:
            summary[key] = spread(value)
    print(json.dumps({name: summary}), flush=True)
    return summary


def table(results):
    def show(s, scale=1, digits=2):
        return f"{s['median'] * scale:.{digits}f} [{s['min'] * scale:.{digits}f} - {s['max'] * scale:.{digits}f}]"

    h = results["hardware"]
    lines = [
        f"# {h['date']}, {h['cores']} x {h['cpu']}",
        "",
        f"Linux {h['kernel']}, {h['memory_gib']} GiB, {h['filesystem']}, load {h['load_before']:.1f} before the run, commit"
        f" {h['commit']}. Medians with [least - most] of the rounds; rounds of the sides interleaved.",
        "",
        "## Models in a memory cgroup",
        "",
        "Page cache counted in, caches dropped before each run. The roofline is 1 / max(in-core pass, missing bytes / disk",
        "rate), each measured in the same round; missing is what a pass uses less the pages' peak.",
        "",
        "| model | where | tok/s | of the roofline | hits | best possible | llama.cpp tok/s | times llama.cpp |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def beside(side):
        if "llama_cpp" not in side:
            return " | |"
        return f" {show(side['llama_cpp'])} | {show(side['of_llama_cpp'])} |"

    for name, summary in results.get("models", {}).items():
        lines.append(f"| {name} | plain memory | {show(summary['plain'])} | | | | | |")
        lines.append(
            f"| | paged, all resident | {show(summary['resident'])} | {show(summary['in_core_ratio'])} of plain | | |"
            + beside(summary)
        )
        for cap, side in summary.items():
            if isinstance(side, dict) and "tok_s" in side:
                lines.append(
                    f"| | {cap} | {show(side['tok_s'])} | {show(side['of_roofline'])} | {show(side['hit'], 100, 1)} % |"
                    f" {show(side['opt'], 100, 1)} % |" + beside(side)
                )
        lines.append(f"| | same logits everywhere | {'yes' if summary['same_logits'] else 'NO'} | | | | | |")
    lines += ["", results["peers"]["llama_cpp"] or NO_PEER, "", results["peers"]["fio"] or NO_FIO]
    rates = [summary for summary in results.get("models", {}).values() if "fio_bytes_s" in summary]
    lines += [
        f"{summary['model_bytes']} bytes: the probe read {show(summary['disk_bytes_s'], 1e-9)} GB/s,"
        f" fio {show(summary['fio_bytes_s'], 1e-9)} GB/s."
        for summary in rates
    ]
    if compared := results.get("libcachesim"):
        lines += ["", "## Policies beside libCacheSim, on made-up conversations", "", compared["table"].strip()]
    if (mapped := results.get("outcore_run")) and "table" in mapped:
        lines += ["", "## `outcore run` beside plain `mmap`, llama.cpp", "", mapped["table"]]
        lines += [f"WRONG: {what}" for what in mapped["wrong"]]
    if (served := results.get("serve")) and "table" in served:
        lines += ["", "## `serve` beside llama.cpp's server", "", served["table"]]
    lines += ["", "## Benches", "", "```json"]
    lines += [json.dumps({name: found}) for name, found in results.get("benches", {}).items()]
    lines += ["```", ""]
    return "\n".join(lines)


NO_PEER = "llama.cpp was ABSENT from this run, so nothing is said of it; `make peers` builds it."
NO_FIO = "fio was ABSENT from this run: the disk's rate is the probe's own."


def peers():
    """What there is to compare with; says loudly what there is not."""
    package = run([PEER.parent / "python", "-m", "pip", "show", "llama-cpp-python"]).stdout if PEER.exists() else ""
    version = re.search(r"^Version: (.*)$", package, re.M)
    found = {
        "llama_cpp": f"llama.cpp out of llama-cpp-python {version.group(1) if version else '?'}, weights memory-mapped,"
        f" {os.cpu_count()} threads, in a process of its own (benches/compare/llama_cpp.c); ids and rounds are those of"
        " the rows' runs."
        if PEER.exists()
        else None,
        "fio": f"{run([FIO, '--version']).stdout.strip()}: io_uring, O_DIRECT, fixed buffers, sequential, block and depth of the probe's best point."
        if FIO
        else None,
    }
    for line in [found["llama_cpp"] or f"WARNING: {NO_PEER}", found["fio"] or f"WARNING: {NO_FIO}"]:
        print(f"bench: {line}", file=sys.stderr, flush=True)
    return found


def main(names):
    folder = Path(tempfile.mkdtemp(prefix="outcore-bench-", dir=os.environ.get("BENCH_DIR", ROOT / "target")))
    results = {"quick": QUICK, "hardware": hardware(folder), "peers": peers(), "benches": {}, "models": {}}
    try:
        for name in BENCHES:
            if not names or name in names:
                results["benches"][name] = cargo_bench(name)
        if not names or "libcachesim" in names:
            results["libcachesim"] = libcachesim(folder)
        if not names or "outcore_run" in names:
            results["outcore_run"] = outcore_run()
            results["shards"] = shards()
        if not names or "serve" in names:
            results["serve"] = serve()
        small = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
        if small.exists() and (not names or "smollm2" in names):
            results["models"]["SmolLM2-135M Q4_1"] = capped("SmolLM2-135M Q4_1", small, 8 * TOKENS, ["130MB"])
        if not names or "q8_0" in names:
            model = folder / "q8.gguf"
            subprocess.run([RELEASE / "make_model", "--vocab", "49152", model], check=True)
            results["models"]["1.24 GB Q8_0, synthetic"] = capped("q8_0", model, TOKENS, ["1000MB", "700MB"])
            model.unlink()
        if not names or "bf16" in names:
            model = folder / "bf16"
            options = ["--format", "safetensors", "--dtype", "BF16", "--layers", "12", "--shards", "4"]
            subprocess.run([RELEASE / "make_model", *options, model], check=True)
            results["models"]["1.3 GB bf16, 4 shards, synthetic"] = capped("bf16", model, TOKENS, ["1000MiB"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stem = ROOT / "docs/results" / f"{results['hardware']['date']}-{os.cpu_count()}-cores{'-quick' if QUICK else ''}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    stem.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main(sys.argv[1:])
