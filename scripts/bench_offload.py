#!/usr/bin/env python3
"""`outcore.torch.offload` beside other ways to run a torch model that does not fit in memory, on the CPU.

    bench_offload.py [--rounds N] [--passes N] [--models DIR] [--only TEXT] [--python FILE] [--out STEM]

Each side is a process in a memory cgroup that counts the page cache: what Python and torch take, and a part of the
model's bytes (1/1.25, 1/2 and 1/3). Caches are dropped before each run; rounds of the sides are interleaved. A pass is
one call of the model with 16 tokens; the first one, which also opens files, is not counted.

- `resident`: from_pretrained of transformers, all in memory and without a limit.
- `outcore`: outcore.torch.offload(folder, memory=the part).
- `mapped`: the module on the meta device, its parameters assigned from safetensors' mapped tensors. A file with fused
  experts is written for it, because transformers would copy them together in memory.
- `accelerate`: its disk offload; as many layers as fit in the part stay in memory.

The bound is the longer of the resident pass and the missing bytes, which are the model's less the part, over the rate
of `outcore probe` in the same round. Needs the environment of `make test-python`, and

    cargo build --release -p outcore-cli -p outcore-python
    PROFILE=release scripts/python_package.sh target/python/release
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
PARTS = [1.25, 2, 3]
SIDES = ["outcore", "mapped", "accelerate"]
TOKENS = 16


def config(name):
    import transformers

    common = dict(vocab_size=32000, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    if name == "llama":
        return transformers.LlamaConfig(**common, num_hidden_layers=16, intermediate_size=5632)
    return transformers.Qwen3MoeConfig(
        **common,
        num_hidden_layers=12,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_experts=48,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )


def make(name, folder):
    """Writes a model with random weights, as transformers writes it, and for `mapped` with fused experts."""
    import safetensors.torch
    import torch
    import transformers

    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_config(config(name)).eval()
    model.save_pretrained(folder / "part", max_shard_size="2GB")
    safetensors.torch.save_file(dict(model.state_dict()), folder / "part" / "fused.st")
    os.replace(folder / "part", folder / name)


def mapped(folder):
    import safetensors.torch
    import torch
    import transformers

    settings = transformers.AutoConfig.from_pretrained(folder)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    model.load_state_dict(safetensors.torch.load_file(folder / "fused.st"), strict=False, assign=True)
    model.tie_weights()
    # What no file has: tables of rotary embeddings are made anew where they are used.
    model.model.rotary_emb = type(model.model.rotary_emb)(settings, device="cpu")
    return model.eval()


def accelerated(folder, part, scratch):
    import transformers

    layers = transformers.AutoConfig.from_pretrained(folder).num_hidden_layers
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # The embeddings and the head stay, and what a layer takes has room.
    kept = int((part / weights) * (layers + 2)) - 3
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{nth}": "cpu" if nth < kept else "disk" for nth in range(layers)}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", device_map=places, offload_folder=scratch
    ).eval()


def child(side, folder, part, passes, scratch):
    import torch
    import transformers

    torch.manual_seed(2)
    # What all sides use besides the model is imported, and its memory counted apart.
    ids = torch.randint(0, 32000, (1, TOKENS))
    begun = time.monotonic()
    if side == "empty":
        print(json.dumps({"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
        return
    if side == "resident":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    elif side == "mapped":
        model = mapped(folder)
    elif side == "accelerate":
        model = accelerated(folder, part, scratch)
    else:
        import outcore

        model = outcore.torch.offload(folder, memory=part)
    opened = time.monotonic() - begun
    seconds, read = [], 0
    with torch.no_grad():
        for nth in range(passes + 1):
            before, at = read_bytes(), time.monotonic()
            logits = model(ids, use_cache=False).logits
            seconds.append(time.monotonic() - at)
            read = read_bytes() - before
    digest = hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()[:16]
    told = {"open_s": opened, "first_s": seconds[0], "pass_s": sorted(seconds[1:])[passes // 2], "read": read}
    told |= {"digest": digest, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if side == "outcore":
        told |= {"numbers": model.outcore.numbers(), "foreseen": model.outcore.plan()}
        model.outcore.close()
    print(json.dumps(told, default=str))


def read_bytes():
    with open("/proc/self/io") as io:
        return int(next(line.split()[1] for line in io if line.startswith("read_bytes")))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--passes", type=int, default=3)
    options.add_argument("--models", type=Path, default=ROOT / "target/bench-models/offload")
    options.add_argument("--only", default="")
    options.add_argument("--python", type=Path, default=ROOT / "target/python/venv/bin/python")
    options.add_argument("--package", type=Path, default=ROOT / "target/python/release")
    options.add_argument("--out", type=Path)
    options.add_argument("--child", nargs=4, metavar=("SIDE", "FOLDER", "PART", "PASSES"), help=argparse.SUPPRESS)
    options.add_argument("--make", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.child:
        side, folder, part, passes = options.child
        return child(side, Path(folder), int(part), int(passes), str(options.models / "scratch"))
    if options.make:
        return make(options.make, options.models)
    bench(options)


def bench(options):
    from bench import hardware, last_json, probe, spread
    from bench_serve import show

    environment = os.environ | {"PYTHONPATH": str(options.package), "HF_HUB_OFFLINE": "1"}

    def python(*arguments, limit=None):
        command = [options.python, __file__, "--models", options.models, *arguments]
        if limit:
            command = [ROOT / "scripts/cgroup_run.sh", "--drop-caches", limit, *command]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
        found = last_json(done.stdout)
        if found is None:
            print(f"bench_offload: {arguments}: {done.stderr[-800:]}", file=sys.stderr, flush=True)
        return found

    options.models.mkdir(parents=True, exist_ok=True)
    lines, all_ = [], {}
    for name in ["llama", "qwen3moe"]:
        if options.only not in name:
            continue
        folder = options.models / name
        if not folder.exists():
            python("--make", name)
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        base = python("--child", "empty", folder, 0, 0)["rss"]
        for times in PARTS:
            part = int(weights / times) // MIB * MIB
            # Activations, buffers, and what the allocators keep.
            limit = base + part + 160 * MIB
            got = {}
            for _ in range(options.rounds):
                rate, _ = probe(next(folder.glob("*.safetensors")), 2 * MIB)
                resident = python("--child", "resident", folder, part, options.passes)
                bound = max(resident["pass_s"], (weights - part) / rate)
                for side in SIDES:
                    told = python("--child", side, folder, part, options.passes, limit=limit)
                    if told:
                        row = {**told, "same": told["digest"] == resident["digest"], "of_bound": bound / told["pass_s"]}
                        got.setdefault(side, []).append(row)
                got.setdefault("resident", []).append({**resident, "rate": rate, "bound": bound})
            all_[f"{name} {times}"] = got
            print(f"bench_offload: {name} {times}: {json.dumps(got)}", file=sys.stderr, flush=True)
            ours = got.get("outcore", [])
            for side in ["resident", *SIDES]:
                rows = got.get(side)
                if not rows:
                    lines.append(f"| {name} | {times} | {side} | did not run | | | | | |")
                    continue
                pass_s = show(spread([row["pass_s"] for row in rows]), 1, 2)
                slower = [theirs["pass_s"] / mine["pass_s"] for theirs, mine in zip(rows, ours)]
                cells = [
                    pass_s,
                    show(spread(slower), 1, 2) if side in SIDES[1:] else "",
                    show(spread([row["of_bound"] for row in rows]), 1, 2) if side == "outcore" else "",
                    str(round(spread([row["read"] / 1e6 for row in rows])["median"])) if side != "resident" else "",
                    str(round(max(row["rss"] for row in rows) / 1e6)),
                    {True: "yes", False: "no", None: ""}[all(row["same"] for row in rows) if side != "resident" else None],
                ]
                lines.append(f"| {name} | {times} | {side} | {' | '.join(cells)} |")
    h = hardware(options.models)
    head = [
        f"{h['cores']} x {h['cpu']}, {h['memory_gib']} GiB, Linux {h['kernel']}; commit {h['commit']}, {h['date']}."
        f" Medians with [least - most] of {options.rounds} rounds, interleaved.",
        "",
        "| model | times the memory | side | s a pass | outcore is so many times faster | of the bound"
        " | MB read in the last pass | peak of resident memory, MB | the resident run's bits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    text = "\n".join(head + lines)
    print(text)
    if options.out:
        options.out.with_suffix(".md").write_text(text + "\n")
        options.out.with_suffix(".json").write_text(json.dumps(all_, default=str))


if __name__ == "__main__":
    main()
