#!/usr/bin/env python3
"""The same model in one file, in 4 and in 16, under `outcore run`: hit ratio, bytes read, and speed.

    bench_shards.py [--rounds N] [--only TEXT] [--models DIR] [--transformers PYTHON]

Each program runs in a memory cgroup that counts the page cache too, with caches dropped before each run. Rounds of the
sides are interleaved, and ratios are taken round by round, to one file of the same round. Programs: llama.cpp on split
GGUF (benches/compare/llama_cpp.c, built by `make peers`), numpy over safetensors in a strict cycle of layers, a
sequential read of each file, and, without `outcore run`, `generate` and `serve`. With --transformers PYTHON also
transformers on a dense model; that Python has it and PyTorch. Prints a table in Markdown, and its figures as one line
of JSON behind it. Exit status 1: a run failed, or made other results than with one file. Models that are missing are
made, and stay.

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
from bench_mapped import MIXTURE, PROMPT, SEED, UNITS, can_run, spread, tell, under_run

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


# Starts the server, asks it twice for the same words, and prints what the second answer took.
SERVE = r"""
import json, re, socket, subprocess, sys, time
import http.client
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen([*sys.argv[2:], "--port", str(port)], stderr=subprocess.PIPE)
def ask(method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()
while True:
    try:
        if ask("GET", "/health")[0] == 200:
            break
    except OSError:
        if server.poll() is not None:
            sys.exit(server.stderr.read().decode())
        time.sleep(0.01)
def words():
    wanted = {"model": "m", "prompt": "One", "max_tokens": int(sys.argv[1]), "temperature": 0}
    status, text = ask("POST", "/v1/completions", wanted)
    assert status == 200, text
    return json.loads(text)["choices"][0]["text"]
words()
begun = time.perf_counter()
text = words()
took = time.perf_counter() - begun
metrics = ask("GET", "/metrics")[1]
def sum_of(name):
    return sum(float(value) for value in re.findall(rf"^\w*{name}(?:_total)?(?:{{[^}}]*}})? ([0-9.e+]+)$", metrics, re.M))
read = re.search(r'^\w+{[^}]*disk_read[^}]*} ([0-9.e+]+)$', metrics, re.M)
print(json.dumps({"tokens": text, "decode_tok_s": int(sys.argv[1]) / took, "read": float(read.group(1)),
                  "hits": sum_of("page_hits") / max(1, sum_of("page_uses"))}))
server.terminate()
server.wait()
"""

# Some tokens of a model in a folder, and how long they take.
TRANSFORMERS = """
import json, sys, time
import torch, transformers
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
ids = torch.tensor([[5, 17, 300, 7]])
mask = torch.ones_like(ids)
exactly = lambda tokens: {"max_new_tokens": tokens, "min_new_tokens": tokens}
run = lambda tokens: model.generate(ids, attention_mask=mask, do_sample=False, **exactly(tokens))
run(1)
begun = time.perf_counter()
words = run(int(sys.argv[2]))
print(json.dumps({"tokens": words[0].tolist(), "decode_tok_s": int(sys.argv[2]) / (time.perf_counter() - begun)}))
"""

# A dense model of 1.5 GB with random weights, in files of at most so many bytes.
MAKE_DENSE = """
import sys
import torch, transformers
torch.manual_seed(1)
config = transformers.LlamaConfig(vocab_size=4096, hidden_size=2048, intermediate_size=5632, num_hidden_layers=14,
                                  num_attention_heads=16, num_key_value_heads=16)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
model.save_pretrained(sys.argv[1], max_shard_size=int(sys.argv[2]))
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


def alone(command, limit):
    """One run of a program of outcore's own: what it printed as JSON."""
    done = run([ROOT / "scripts/cgroup_run.sh", "--drop-caches", f"{limit}MiB", *command])
    if done.returncode == SKIPPED:
        return {"skipped": done.stderr.strip().splitlines()[-1]}
    found = last_json(done.stdout)
    if done.returncode or found is None:
        return {"failed": f"status {done.returncode}: {done.stderr.strip()[-500:]}"}
    # `serve` gives the ratio itself, and `generate` counts.
    return {"read": found.get("disk_read_bytes"), **found, "hits": found.get("hit_ratio", found["hits"]), "order": ""}


def once(command, limit, budget):
    """One run: what it printed as JSON, and what `outcore run` said at the end. Without a budget it is outcore's own."""
    if budget is None:
        return alone(command, limit)
    done = under_run(command, limit, budget)
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


def dense(python, folder, files):
    """A folder with a dense model for transformers in so many files, or nearly."""
    made = folder / f"dense{files}"
    if not (made / "config.json").exists():
        tell(f"making {made}")
        largest = 1_500_000_000 if files == 1 else 1_300_000_000 // files
        done = run([python, "-c", MAKE_DENSE, made, largest])
        if done.returncode:
            sys.exit(f"bench_shards: {made} was not made: {done.stderr.strip()[-500:]}")
    return made


def cases(folder, only, python):
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

    def own(name, command, limit):
        return Case(name, limit, None, command, lambda found: found["tokens"], lambda found: found["decode_tok_s"])

    def generate(files):
        model = split(folder / "q8.gguf", folder, files)[0]
        return [RELEASE / "generate", "--model", model, "--prompt-tokens", "5,17,300,7", "--tokens", 24, "--json"]

    def serve(files):
        model = split(folder / "q8.gguf", folder, files)[0]
        server = [RELEASE / "serve", "--model", model, "--name", "m", "--concurrency", 1, "--context", 256]
        return [PYTHON, "-c", SERVE, 16, *server]

    def transformers(files):
        return [python, "-c", TRANSFORMERS, dense(python, folder, files), 8]

    last = lambda found: found["decode_tok_s"]
    # With less besides its pages, the kernel takes PyTorch's own code, in some runs and not in others.
    of_torch = [Case("transformers, 1.5 GB bf16", 1800, 900, transformers, lambda found: found["tokens"], last)]
    all_cases = [
        llama("llama.cpp, 1.2 GB Q8_0", folder / "q8.gguf", 24, 700, 630),
        llama("llama.cpp, 4 GB mixture", folder / "moe.gguf", 48, 2000, 1850, SEED),
        numpy("numpy, 576 MiB in a cycle of layers", "layers", 8, 450, 300),
        numpy("numpy, 576 MiB once, by offset", "offset", 1, 450, 300),
        own("`generate`, 1.2 GB Q8_0", generate, 700),
        own("`serve`, 1.2 GB Q8_0", serve, 700),
        *(of_torch if python else []),
    ]
    return [case for case in all_cases if only in case.name]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", default="", help="cases whose name has this text")
    options.add_argument("--models", type=Path, default=RELEASE.parent / "bench-models", help="where models are made")
    options.add_argument("--transformers", type=Path, metavar="PYTHON", help="a Python with transformers and PyTorch")
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
    all_cases = cases(folder, options.only, options.transformers)
    todo = [(case, {files: case.commands(files) for files in FILES}) for case in all_cases]
    # What was just made is on the disk before anything is measured.
    os.sync()
    for case, commands in todo:
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
