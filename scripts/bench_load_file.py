#!/usr/bin/env python3
"""`outcore.load_file` beside other loaders of safetensors, and beside plain reads into fresh memory.

    bench_load_file.py [--gb N] [--rounds N] [--folder DIR] [--loaders A,B] [--headers 8,64] [--reads N] [--keep]

Makes a file of random bf16 weights, of N GB, in DIR, for each of the alignments of the header: by 8 bytes, as
safetensors pads it, so that outcore has to move every tensor to an address that is a multiple of 64; and by 64, so that
none moves. Each run is a process of its own, before which the file is dropped from the page cache. Rounds of the sides
are interleaved, and ratios are taken round by round. What is timed is the call of the loader, and the call with a touch
of every page of every tensor behind it, because some loaders map the file and read nothing before.

The probe (benches/compare/read_fresh.c, built here by cc) reads the file with O_DIRECT into fresh memory, which is
touched in the same way. Loaders that are not installed are left out. The package outcore is found by PYTHONPATH, or is
installed; build it in the release profile. Prints a table in Markdown, and its figures as one line of JSON behind it.
"""

import argparse
import ctypes
import importlib
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import ROOT, hardware, last_json, run, spread

MIB = 1 << 20
HIDDEN = 4096
BLOCK = 64 * MIB


def tell(text):
    print(f"bench_load_file: {text}", file=sys.stderr, flush=True)


# ---- the loaders: each gives tensors of torch by name ----


def by_outcore(path):
    return importlib.import_module("outcore").load_file(path)


def by_safetensors(path):
    return importlib.import_module("safetensors.torch").load_file(path)


def by_safetensors_pread(path):
    return importlib.import_module("safetensors.torch").load_file(path, backend="pread")


def by_fastsafetensors(path):
    loaders = importlib.import_module("fastsafetensors")
    loader = loaders.SafeTensorsFileLoader(loaders.SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [path]})
    buffers = loader.copy_files_to_device()
    tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    # They lie in what these own.
    return {**tensors, "": (loader, buffers)}


def by_runai(path):
    streamer = importlib.import_module("runai_model_streamer").SafetensorsStreamer()
    with streamer:
        streamer.stream_file(path)
        # What it gives is in a buffer that it uses again.
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def by_instanttensor(path):
    with importlib.import_module("instanttensor").safe_open([path], framework="pt", device="cpu") as opened:
        return dict(opened.tensors())


LOADERS = {
    "outcore": (by_outcore, "outcore"),
    "safetensors": (by_safetensors, "safetensors.torch"),
    "safetensors-pread": (by_safetensors_pread, "safetensors.torch"),
    "fastsafetensors": (by_fastsafetensors, "fastsafetensors"),
    "runai-model-streamer": (by_runai, "runai_model_streamer"),
    "instanttensor": (by_instanttensor, "instanttensor"),
}


def cached(path):
    """Bytes of a file in the page cache, by cachestat (Linux 6.5); None where it is not to be had."""
    wanted, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    with open(path, "rb") as file:
        failed = ctypes.CDLL(None, use_errno=True).syscall(451, file.fileno(), wanted, found, 0)
    return None if failed else found[0] * resource.getpagesize()


def loaded_once(name, path, *arguments):
    """What one run of a loader says, in a process of its own."""
    # Imports are not what is measured; safetensors and outcore import torch when they are called. The probe is run
    # behind them too: a virtual machine hands free memory back to its host after some time, and to take memory that was
    # just freed is several times as fast as to take it from the host.
    importlib.import_module("torch")
    importlib.import_module("numpy")
    if name == "probe":
        cpu, before = resource.getrusage(resource.RUSAGE_CHILDREN), cached(path)
        done = run([arguments[0], path, *arguments[1:]])
        if done.returncode:
            sys.exit(done.stderr)
        used, kept = resource.getrusage(resource.RUSAGE_CHILDREN), cached(path)
        seconds = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
        growth = None if kept is None else kept - before
        print(json.dumps({**last_json(done.stdout), "cpu_seconds": seconds, "cache_growth": growth}))
        return
    load = LOADERS[name][0]
    importlib.import_module(LOADERS[name][1])
    before, start, cpu = cached(path), time.perf_counter(), time.process_time()
    tensors = load(path)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    total = touched(tensors)
    all_seconds = time.perf_counter() - start
    kept = cached(path)
    print(json.dumps({
        "seconds": seconds, "touched_seconds": all_seconds, "cpu_seconds": cpu, "sum": total,
        "cache_growth": None if kept is None else kept - before,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }))


def touched(tensors):
    """Touches each page of each tensor; the sum of a byte of each, to compare."""
    torch = importlib.import_module("torch")
    total = 0
    for tensor in tensors.values():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            total += int(tensor.reshape(-1).view(torch.uint8)[::4096].sum(dtype=torch.int64))
    return total


# ---- the file ----


def layout(size):
    """Names and shapes of a model of about so many bytes."""
    yield "model.embed_tokens.weight", (32768, HIDDEN)
    made, layer = 2 * 32768 * HIDDEN, 0
    while made < size:
        for name, shape in (
            ("input_layernorm", (HIDDEN,)), ("self_attn.q_proj", (HIDDEN, HIDDEN)), ("self_attn.k_proj", (1024, HIDDEN)),
            ("self_attn.v_proj", (1024, HIDDEN)), ("self_attn.o_proj", (HIDDEN, HIDDEN)),
            ("post_attention_layernorm", (HIDDEN,)), ("mlp.gate_proj", (14336, HIDDEN)), ("mlp.up_proj", (14336, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, 14336)),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape
            elements = 1
            for extent in shape:
                elements *= extent
            made += 2 * elements
        layer += 1


def make(path, size, header_ends):
    """A file whose header's end is a multiple of `header_ends`, and of 8 bytes more if that is 8."""
    numpy = importlib.import_module("numpy")
    header, end = {}, 0
    for name, shape in layout(size):
        elements = int(numpy.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * elements]}
        end += 2 * elements
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64) + b" " * (8 if header_ends == 8 else 0)
    random = numpy.random.default_rng(1)
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, end, BLOCK):
            file.write(random.bytes(min(BLOCK, end - start)))
        os.fsync(file.fileno())
    part.rename(path)


def drop_cache(path):
    """Takes the file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def build_probe(folder):
    probe = folder / "read_fresh"
    done = run(["cc", "-O2", "-pthread", "-o", probe, ROOT / "benches/compare/read_fresh.c"])
    if done.returncode:
        sys.exit(f"bench_load_file: cc cannot build the probe: {done.stderr}")
    return probe


def installed(names):
    here = []
    for name in names:
        done = run([sys.executable, "-c", f"import torch, numpy, {LOADERS[name][1]}"])
        if done.returncode:
            tell(f"SKIPPED {name}: {done.stderr.strip().splitlines()[-1]}")
        else:
            here.append(name)
    return here


def measure(path, names, probe, rounds, reads, wrong):
    """Runs of each side by its name: rounds of all sides in turn."""
    sides = {"probe": [sys.executable, __file__, "--once", "probe", path, probe, reads]}
    sides.update({name: [sys.executable, __file__, "--once", name, path] for name in names})
    found = {name: [] for name in sides}
    for number in range(rounds):
        # The order turns, so that no side always comes behind the same one.
        order = list(sides)
        order = order[number % len(order):] + order[: number % len(order)]
        for name in order:
            drop_cache(path)
            done = run(sides[name])
            got = last_json(done.stdout)
            if done.returncode or got is None:
                why = done.stderr.strip().splitlines()
                wrong.append(f"{name} failed: {why[-1] if why else done.returncode}")
                sides.pop(name)
                found.pop(name)
                continue
            found[name].append(got)
    return found


def row(name, runs, probes, size):
    def of(key):
        values = [got[key] for got in runs if got.get(key) is not None]
        return spread(values) if values else None

    figures = {"loader": name, "seconds": of("seconds"), "touched_seconds": of("touched_seconds"), "cpu": of("cpu_seconds"),
               "cache_growth": of("cache_growth"), "peak_rss": of("peak_rss"), "bytes": size}
    if name != "probe":
        for key in ("seconds", "touched_seconds"):
            ratios = [probed["seconds"] / got[key] for probed, got in zip(probes, runs)]
            figures[f"{key}_of_probe"] = spread(ratios)
    return figures


def shown(row):
    def span(key, scale=1.0, digits=2):
        of = row.get(key)
        if of is None:
            return ""
        return f"{of['median'] / scale:.{digits}f} ({of['min'] / scale:.{digits}f} - {of['max'] / scale:.{digits}f})"

    growth = row["cache_growth"]
    share = "" if growth is None else f"{100 * growth['median'] / row['bytes']:.2f} %"
    cells = [row["loader"], span("seconds"), span("touched_seconds"), f"{row['bytes'] / row['seconds']['median'] / 1e9:.2f}",
             span("seconds_of_probe"), span("touched_seconds_of_probe"), share, span("peak_rss", 1 << 30), span("cpu")]
    return f"| {' | '.join(cells)} |"


def main():
    if sys.argv[1:2] == ["--once"]:
        return loaded_once(*sys.argv[2:])
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gb", type=float, default=4, help="size of each file, in 10^9 bytes")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--folder", type=Path, help="where files are made; default: a new folder here, which goes again")
    options.add_argument("--loaders", default=",".join(LOADERS))
    options.add_argument("--headers", default="8,64", help="what the ends of the headers are multiples of")
    options.add_argument("--reads", type=int, default=8, help="reads in flight of the probe")
    options.add_argument("--keep", action="store_true", help="leaves the files in the folder")
    options = options.parse_args()
    names = options.loaders.split(",")
    if unknown := [name for name in names if name not in LOADERS]:
        sys.exit(f"bench_load_file: no loader is called {unknown[0]}: choose from {', '.join(LOADERS)}")
    with tempfile.TemporaryDirectory(dir=options.folder or ROOT / "target") as scratch:
        folder = options.folder or Path(scratch)
        names, probe, wrong, files = installed(names), build_probe(Path(scratch)), [], []
        machine = hardware(folder)
        for header in (int(header) for header in options.headers.split(",")):
            path = folder / f"load-{options.gb:g}-{header}.safetensors"
            if not path.exists():
                tell(f"making {path}")
                make(path, options.gb * 1e9, header)
            files.append((header, path))
        rows = []
        for header, path in files:
            found, size = measure(path, names, probe, options.rounds, options.reads, wrong), path.stat().st_size
            sums = {got["sum"] for name, runs in found.items() for got in runs if name != "probe"}
            if len(sums) > 1:
                wrong.append("not all loaders gave the same bytes")
            rows += [{"header": header, **row(name, runs, found["probe"], size)} for name, runs in found.items() if runs]
            print(f"\n{size / 1e9:.2f} GB in one file, header padded to {header}:\n")
            print("| | call, s | with every page touched, s | GB/s | probe / call | probe / touched | page cache grew by, of the"
                  " file | most memory, GiB | processor, s |\n|---|---|---|---|---|---|---|---|---|")
            print(*(shown(row) for row in rows if row["header"] == header), sep="\n", flush=True)
            if not options.keep:
                path.unlink()
        print(json.dumps({"hardware": machine, "reads": options.reads, "rows": rows, "wrong": wrong}))
        for what in wrong:
            tell(f"WRONG: {what}")
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
