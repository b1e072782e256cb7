#!/usr/bin/env python3
"""llama.cpp's server beside llama-cpp-python, both under `outcore run`, on a mixture of experts that does not fit.

    bench_engines.py [--rounds N] [--tokens N] [--models DIR]

Both are of the same version of llama.cpp, from `make peers`. Each run is in a memory cgroup of the same size, which
counts the page cache too, with caches dropped before. The words are drawn, with the same seed in both: greedy words of
random weights fall into a loop, which uses few experts. Rounds are interleaved, and the ratio is taken round by round.
Prints a table in Markdown, and its figures as one line of JSON behind it. Exit status 1: a run failed. A model that is
missing is made, 4 GB, and stays.

Where llama.cpp, userfaultfd or memory cgroups are not to be had, it says so on standard error, and is no failure.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from bench import PEER, RELEASE, SKIPPED, hardware, last_json
from bench_mapped import MIXTURE, PROMPT, SEED, UNITS, can_run, spread, tell, under_run

PYTHON, SERVER = PEER.parent / "python", PEER.with_name("llama-server")
# Of the cgroup and of the pages, in MiB. The rest is the engine's own memory.
LIMIT, BUDGET = 2000, 1850

# Both take: model, prompt, tokens, threads, seed. Both print how many tokens a second they made after the prompt.
LIBRARY = """
import json, sys, time
import llama_cpp
model, prompt, tokens, threads, seed = sys.argv[1], json.loads(f"[{sys.argv[2]}]"), *map(int, sys.argv[3:6])
engine = llama_cpp.Llama(model, n_ctx=512, n_threads=threads, n_threads_batch=threads, seed=seed, verbose=False)
words = engine.generate(prompt, temp=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, repeat_penalty=1.0)
made = [next(words)]
begun = time.perf_counter()
made += [word for word, _ in zip(words, range(tokens - 1))]
print(json.dumps({"tokens": made, "tok_s": (tokens - 1) / (time.perf_counter() - begun)}))
"""
SERVED = """
import json, socket, subprocess, sys, time
import http.client
server, model, prompt, tokens, threads, seed = sys.argv[1:7]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
options = ["-np", "1", "-c", "512", "-t", threads, "-tb", threads, "--no-warmup", "--host", "127.0.0.1", "--port", port]
child = subprocess.Popen([server, "-m", model, *options], stdout=subprocess.DEVNULL)
def ask(method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=900)
    connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()
try:
    while True:
        try:
            if ask("GET", "/health")[0] == 200:
                break
        except OSError:
            pass
        if child.poll() is not None:
            sys.exit(f"llama-server ended with status {child.returncode}")
        time.sleep(0.01)
    wanted = {"prompt": json.loads(f"[{prompt}]"), "n_predict": int(tokens), "seed": int(seed), "ignore_eos": True,
              "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "return_tokens": True}
    status, text = ask("POST", "/completion", wanted)
    if status != 200:
        sys.exit(text)
    found = json.loads(text)
    # The time begins with the first word, as in the other program.
    seconds = found["timings"]["predicted_ms"] / 1000
    print(json.dumps({"tokens": found["tokens"], "tok_s": (len(found["tokens"]) - 1) / seconds}))
finally:
    child.terminate()
    child.wait()
"""


def once(command):
    """One run under `outcore run`: what it printed, and what was read."""
    done = under_run(command, LIMIT, BUDGET)
    if done.returncode == SKIPPED:
        return {"skipped": done.stderr.strip().splitlines()[-1]}
    found = last_json(done.stdout)
    read = re.search(r"([0-9.]+) ?([KMGT]?i?B) read", done.stderr)
    if done.returncode or found is None or not read:
        return {"failed": f"status {done.returncode}: {done.stderr.strip()[-800:]}"}
    return {**found, "read": float(read.group(1)) * UNITS[read.group(2)]}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--models", type=Path, default=RELEASE.parent / "bench-models", help="where models are made")
    options = options.parse_args()
    if not can_run():
        return
    model = options.models / "moe.gguf"
    if not model.exists():
        tell(f"making {model}")
        options.models.mkdir(parents=True, exist_ok=True)
        subprocess.run([RELEASE / "make_model", model, *MIXTURE], check=True, stdout=subprocess.DEVNULL)
        os.sync()
    last = [model, PROMPT, options.tokens, os.cpu_count(), SEED]
    sides = {
        "llama-cpp-python": [PYTHON, "-c", LIBRARY, *last],
        "llama-server": [PYTHON, "-c", SERVED, SERVER, *last],
    }
    found = {name: [] for name in sides}
    for number in range(options.rounds):
        for name, command in sides.items():
            got = once(command)
            if "skipped" in got:
                tell(f"SKIPPED: {got['skipped']}")
                return
            if "failed" in got:
                sys.exit(f"bench_engines: {name}: {got['failed']}")
            tell(f"round {number + 1}: {name}: {got['tok_s']:.2f} tok/s, {got['read'] / 1e9:.2f} GB read")
            found[name].append(got)
    base = found["llama-cpp-python"]
    print("| 4 GB mixture, 2000 MiB | tok/s | of llama-cpp-python's | GB read |", "|---|---|---|---|", sep="\n")
    for name, runs in found.items():
        rates = [got["tok_s"] for got in runs]
        ratios = [got["tok_s"] / other["tok_s"] for got, other in zip(runs, base)]
        read = statistics.median(got["read"] for got in runs) / 1e9
        print(f"| {name} | {spread(rates)} | {spread(ratios)} | {read:.2f} |")
    same = all(got["tokens"] == base[0]["tokens"] for runs in found.values() for got in runs)
    print(f"\nThe same words in all runs: {'yes' if same else 'no'}.")
    figures = {name: {key: [got[key] for got in runs] for key in ("tok_s", "read")} for name, runs in found.items()}
    print(json.dumps({"hardware": hardware(options.models), "sides": figures, "same": same}))


if __name__ == "__main__":
    main()
