#!/usr/bin/env python3
"""`generate` beside llama.cpp with all of a model in memory, by architecture and type of weight.

    bench_architectures.py [ARCH...] [--rounds N] [--models DIR] [--out STEM]

Models have random weights, of which `make_model` writes a few hundred megabytes. Both sides compute on all processors
and are given the same prompt; greedy. `decode` is of passes of one token, by their median; `16` and `256` are one pass
over a prompt of so many tokens, which both sides have read before, so that all of the file is in memory. The sides
follow each other in each round, and ratios are taken round by round. Needs what `make peers` builds.
"""

import argparse
import json
import random
from pathlib import Path

from bench import PEER, RELEASE, generate, hardware, peer, spread
from bench_mapped import Model, make, tell
from bench_serve import show

SHAPE = ["--layers", "16", "--dim", "1024", "--heads", "16", "--kv-heads", "4", "--vocab", "32000"]
DENSE = [*SHAPE, "--ffn", "4096"]
MIXED = [*SHAPE, "--ffn", "512", "--experts", "32", "--experts-used", "4"]
MODELS = {
    "llama": DENSE,
    "qwen3": DENSE,
    "gemma2": DENSE,
    "gemma3": DENSE,
    "phi3": DENSE,
    "llama mixture": MIXED,
    "qwen2moe": MIXED,
    "olmoe": MIXED,
    "qwen3moe": MIXED,
    "gpt-oss": MIXED,
    "glm4moe": MIXED,
}
TYPES = {"gpt-oss": ["Q8_0", "MXFP4"], "llama": ["Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"]}
TOKENS = 64
PROMPTS = [16, 256]
# How often each prompt is read, and the last time counts.
TIMES = 3


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("archs", nargs="*", metavar="ARCH")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--models", type=Path, default=RELEASE.parent / "bench-models")
    options.add_argument("--out", type=Path)
    options = options.parse_args()
    if not PEER.exists():
        tell("SKIPPED: llama.cpp is ABSENT; `make peers` builds it")
        return
    rows = {}
    draw = random.Random(1)
    prompts = [[draw.randrange(300, 31000) for _ in range(tokens)] for tokens in PROMPTS]
    prompts = [",".join(map(str, prompt)) for prompt in prompts]
    for name in options.archs or MODELS:
        for dtype in TYPES.get(name, ["Q8_0"]):
            file = options.models / f"{name.replace(' ', '-')}-{dtype}.gguf"
            arch = name.split()[0]
            was_there = file.exists()
            if not make(Model(name, file, 0, made_by=["--arch", arch, "--dtype", dtype, *MODELS[name]])):
                continue
            got = rows.setdefault((name, dtype), {"decode": [], "ours": [], "theirs": [], **{tokens: [] for tokens in PROMPTS}})
            for _ in range(options.rounds):
                for tokens, prompt in zip(PROMPTS, prompts):
                    ours = generate(file, TOKENS, ["--prompt-tokens", prompt, "--repeat", TIMES])
                    theirs = peer(file, TOKENS, prompt, more=["0", TIMES])
                    if theirs and "pass_s_median" in theirs:
                        got[tokens].append(theirs["ttft_s"] / ours["ttft_s"])
                if not theirs or "pass_s_median" not in theirs:
                    continue
                got["ours"].append(1 / ours["pass_s_median"])
                got["theirs"].append(1 / theirs["pass_s_median"])
                got["decode"].append(theirs["pass_s_median"] / ours["pass_s_median"])
            tell(f"{name} {dtype}: {json.dumps(got)}")
            if not was_there:
                file.unlink()
    h = hardware(options.models)
    lines = [
        f"{h['cores']} x {h['cpu']}, {h['memory_gib']} GiB, Linux {h['kernel']}; commit {h['commit']}, {h['date']}."
        f" Medians with [least - most] of {options.rounds} rounds, interleaved.",
        "",
        "| architecture | type | tokens/s | llama.cpp | times, decode | times, 16 | times, 256 |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, dtype), got in rows.items():
        if got["ours"]:
            cells = [show(spread(got[key])) for key in ["ours", "theirs"]]
            cells += [show(spread(got[key]), 1, 2) for key in ["decode", *PROMPTS]]
            lines.append(f"| {name} | {dtype} | {' | '.join(cells)} |")
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
