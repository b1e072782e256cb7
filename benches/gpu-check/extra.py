#!/usr/bin/env python3
"""The parts of the GPU check that are no probes: test binaries, compute-sanitizer, `generate`, a peer.

Called by run.sh as `extra.py PART --bundle DIR --scale SCALE --dir DIR --results FILE`. Prints records as gpu-probe
does, one JSON object a line. Ends with 1 if the part failed, and with 3 if the machine or the bundle has not what it
needs.
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

NOT_POSSIBLE = 3


def record(kind, **fields):
    print(json.dumps({"record": kind, **fields}), flush=True)


def number(name, unit, rounds, ceiling=None):
    fields = {"median": statistics.median(rounds), "least": min(rounds), "most": max(rounds), "rounds": len(rounds)}
    record("number", name=name, unit=unit, **fields, **({"ceiling": ceiling} if ceiling else {}))


def verdict(name, value, unit, goal, formula):
    (sense, bound), = goal.items()
    met = value >= bound if sense == "at_least" else value <= bound
    record("verdict", name=name, value=value, unit=unit, goal=goal, formula=formula, **{"pass": met})


def not_possible(why):
    print(why, file=sys.stderr)
    sys.exit(NOT_POSSIBLE)


def fail(why):
    print(why, file=sys.stderr)
    sys.exit(1)


def run(command, **environment):
    """What a command printed, both streams, and its status. It shares our process group, so that it is stopped with us."""
    command = [str(part) for part in command]
    merged = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=merged)
    return done.returncode, done.stdout, done.stderr


def binary(arguments, name):
    path = Path(arguments.bundle) / "bin" / name
    if not path.exists():
        not_possible(f"{name} is not in this bundle")
    return path


# ---- test binaries, on the real driver ----


def passed_tests(output):
    """How many tests passed and failed, by the test runner's own closing line."""
    found = re.search(r"test result: \S+ (\d+) passed; (\d+) failed", output)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def report_skipped(output):
    """The lines of tests that skipped, because the machine lacks something. They do not count as tests that passed."""
    skipped = [line.strip() for line in output.splitlines() if line.startswith("SKIPPED")]
    for line in skipped:
        record("note", text=line)
    return skipped


def run_tests(name, path, module, threads, **environment):
    """Runs the tests of a module, which the results call `name`. How many passed, what they printed, and why the part is to fail, or None."""
    # The output of tests that pass is shown too: it says what they skipped, and what they measured.
    status, out, errors = run([path, module, f"--test-threads={threads}", "--show-output"], **environment)
    passed, failed = passed_tests(out)
    skipped = report_skipped(out + errors)
    number(f"{name}: tests passed", "tests", [passed - len(skipped)])
    number(f"{name}: tests failed", "tests", [failed])
    why = None
    if status != 0 or failed:
        which = re.findall(r"^test (\S+) \.\.\. FAILED$", out, re.M)
        print(out[-4000:], errors[-4000:], sep="\n", file=sys.stderr)
        why = f"{failed} tests failed: {', '.join(which)}" if which else f"{name} ended with {status}"
    elif passed <= len(skipped):
        why = f"{name}: {passed} tests passed, of which {len(skipped)} were skipped: nothing was shown"
    return out, skipped, why


def tests(arguments, *modules):
    """Runs modules of tests on the real driver. They are made for a GPU, so none of them may skip."""
    reasons = []
    for module in modules:
        name = module.split("::")[0]
        _, skipped, why = run_tests(name, binary(arguments, "device"), module, 4, OUTCORE_REAL_CUDA="1")
        reasons += [why] if why else [f"{name} skipped {len(skipped)} tests"] if skipped else []
    if reasons:
        fail("; ".join(reasons))


# No test of the device takes longer, unless something waits for ever.
TEST_SECONDS = 15


def device_suite(arguments):
    """Runs the tests one by one, each in a process of its own, so that one that hangs is named and ends the others not."""
    path = binary(arguments, "device")
    status, out, errors = run([path, "suite::cuda_real", "--list"], OUTCORE_REAL_CUDA="1")
    names = re.findall(r"^(\S+): test$", out, re.M)
    if status or not names:
        fail(f"the tests cannot be listed: {errors.strip()}")
    passed, wrong, skipped = 0, [], 0
    for name in names:
        command = ["timeout", "--kill-after=5", TEST_SECONDS, path, "--exact", name, "--test-threads=1", "--show-output"]
        status, out, errors = run(command, OUTCORE_REAL_CUDA="1")
        skips = report_skipped(out + errors)
        skipped += len(skips)
        passed += status == 0 and not skips
        if status:
            wrong.append(f"{name} did not end within {TEST_SECONDS} s" if status in (124, 137) else f"{name} failed")
            print(out[-2000:], errors[-2000:], sep="\n", file=sys.stderr)
    number("suite: tests passed", "tests", [passed])
    number("suite: tests failed", "tests", [len(wrong)])
    if wrong:
        fail("; ".join(wrong))
    if not passed:
        fail(f"{len(names)} tests, of which {skipped} were skipped: nothing was shown")
    if skipped:
        fail(f"suite skipped {skipped} tests")


def runtime_suite(arguments):
    tests(arguments, "cuda::cuda_real", "pins_on_streams::cuda_real")


# What is computed on the GPU, compared with the CPU: binary, module, and the lines whose largest error is judged. For
# some types of weights the CPU rounds activations to eight bits; the GPU never does.
ERRORS = [
    ("kernels", "cuda::tests", {"1e-5": ("kernels and cuBLAS against sums in f64", 1e-3)}),
    (
        "forward",
        "on_a_gpu",
        {
            "1e-3": ("logits against the CPU's, weights in f32, f16, bf16 and types whose activations are not rounded", 1e-3),
            "3e-2": ("logits against the CPU's, types for which the CPU rounds activations to eight bits", 3e-2),
        },
    ),
]


def compiled_kernels(arguments):
    """The file of kernels that were compiled beforehand, if the bundle has one."""
    folder = Path(arguments.bundle) / "kernels"
    return next((file for ending in ["fatbin", "cubin", "ptx"] for file in sorted(folder.glob(f"*.{ending}"))), None)


def finite(error):
    """The number in a text. Infinity and NaN become the largest float: JSON cannot hold them, and they must not
    pass."""
    value = float(error)
    return value if math.isfinite(value) else sys.float_info.max


def kernels(arguments):
    environment = {"OUTCORE_TEST_GPU": "0"}
    file = compiled_kernels(arguments)
    if file:
        environment["OUTCORE_TEST_KERNELS"] = str(file)
    else:
        record("note", text="no compiled kernels are in this bundle: NVRTC has to compile them")
    reasons = []
    for name, module, wanted in ERRORS:
        out, _, why = run_tests(name, binary(arguments, name), module, 1, **environment)
        reasons += [why] if why else []
        found = re.findall(r"^relative error (\S+), (\S+) allowed: (.*)$", out, re.M)
        for allowed, (what, most) in wanted.items():
            errors = [(finite(error), case) for error, bound, case in found if bound == allowed]
            if not errors:
                reasons.append(f"{name}: nothing was compared within {allowed}")
                continue
            largest, case = max(errors)
            record("chosen", name=f"largest error, {what}", value=f"{largest:.2e} of {len(errors)}: {case}")
            formula = "length of the difference / length of what is right; largest of all that were compared"
            verdict(what, largest, "relative", {"at_most": most}, formula)
    if reasons:
        fail("; ".join(reasons))


def sanitizer(arguments):
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not tool:
        not_possible("compute-sanitizer is not installed")
    options = [tool, "--tool", "memcheck", "--error-exitcode", "99"]
    runs = [
        ("device suite", [binary(arguments, "device"), "suite::cuda_real", "--test-threads=1"]),
        ("overlap, small", [binary(arguments, "gpu-probe"), "run", "overlap", "--scale", "tiny", "--dir", arguments.dir + "/sanitizer"]),
    ]
    os.makedirs(arguments.dir + "/sanitizer", exist_ok=True)
    for name, command in runs:
        status, out, errors = run([*options, *command], OUTCORE_REAL_CUDA="1")
        text = out + errors
        if "Device not supported" in text or "Unable to" in text and "ERROR SUMMARY" not in text:
            not_possible("compute-sanitizer cannot be used here: " + text.strip().splitlines()[0])
        found = re.search(r"ERROR SUMMARY: (\d+) error", text)
        if not found:
            print(text[-4000:], file=sys.stderr)
            fail(f"compute-sanitizer did not end on {name}: status {status}")
        number(f"errors found in: {name}", "errors", [int(found.group(1))])
        if int(found.group(1)) or status:
            print(text[-6000:], file=sys.stderr)
            fail(f"{name} under compute-sanitizer: {found.group(0)}, status {status}")


# ---- models ----

# SmolLM2-135M's layers, width, heads and so on. Its own file is larger than a bundle may be.
SMOLLM2 = ["--layers", 30, "--dim", 576, "--heads", 9, "--kv-heads", 3, "--ffn", 1536, "--vocab", 49152, "--tied", "--dtype", "Q4_1"]


def models(arguments):
    """Name and file of each model; those that are missing are made."""
    make = binary(arguments, "make_model")
    real = os.environ.get("OUTCORE_MODEL")
    wanted = [("1.2 GB Q8_0, synthetic", [], "large.gguf")]
    if real:
        yield Path(real).name, Path(real)
    else:
        record("note", text="SmolLM2's own file is larger than a bundle may be: a synthetic model of its shape stands in (OUTCORE_MODEL names a file)")
        wanted.insert(0, ("SmolLM2-135M's shape, Q4_1, synthetic", SMOLLM2, "small.gguf"))
    for name, options, file in wanted[:1] if arguments.scale == "tiny" else wanted:
        path = Path(arguments.dir) / file
        status, _, errors = run([make, path, *options])
        if status:
            fail(f"make_model: {errors.strip()}")
        yield name, path


def generate(arguments):
    program = binary(arguments, "generate")
    _, usage, _ = run([program, "--help"])
    if "cuda" not in usage:
        not_possible("the generate of this bundle has no CUDA device")
    file = compiled_kernels(arguments)
    tokens = "8" if arguments.scale == "tiny" else "32"
    common = ["--prompt-tokens", "1,2,3,4,5,6,7,8", "--tokens", tokens, "--device", "cuda", "--json"]
    if file and "--kernels" in usage:
        common += ["--kernels", file]
    else:
        record("note", text="no compiled kernels are in this bundle: generate has to compile its own")
    for name, path in models(arguments):
        size = path.stat().st_size
        # At least what the largest tensors take together with the pages that are filled ahead.
        part = max(size // 4, 64 << 20)
        settings = [
            ("all resident", size + (256 << 20), 0),
            (f"{part >> 20} MiB on the GPU, the rest in host memory", part, size + (64 << 20)),
        ]
        hashes, passes = [], []
        for where, device, host in settings:
            status, out, errors = run([program, "--model", path, *common, "--device-budget", device, "--host-budget", host])
            lines = [line for line in out.splitlines() if line.startswith("{")]
            if status or not lines:
                print(errors[-4000:], file=sys.stderr)
                fail(f"generate on {name}, {where}: status {status}")
            found = json.loads(lines[-1])
            number(f"{name}, {where}: tokens a second", "tok/s", [found["decode_tok_s"]])
            number(f"{name}, {where}: pass", "s", [found["pass_s_median"]])
            hashes.append(found["logits_xxh3"])
            passes.append(found["pass_s_median"])
            if found["peak_device_bytes"] > found["device_budget_bytes"]:
                fail(f"{name}, {where}: more in frames than the budget")
        number(f"{name}: pass, with part on the GPU / all resident", "ratio", [passes[1] / passes[0]])
        same = float(hashes[0] == hashes[1])
        verdict(f"{name}: same logits", same, "ratio", {"at_least": 1}, "1 if every logit of both runs has the same bits")
        if path.parent == Path(arguments.dir):
            path.unlink()


# ---- a peer ----

ROWS, COLS, TOKENS = 4096, 8192, 16


def ours(results):
    """Bytes of the oversized model and seconds of its pass, if that part ran here."""
    numbers = json.loads(Path(results).read_text())["parts"].get("oversized", {}).get("numbers", {})
    if "pass" in numbers and "bytes of the model" in numbers:
        return numbers["bytes of the model"]["median"], numbers["pass"]["median"]
    return None, None


def accelerate(arguments):
    if arguments.scale == "tiny":
        not_possible("a peer has nothing to say about sizes of a test")
    try:
        import accelerate as peer
        import torch
    except ImportError as missing:
        not_possible(f"PyTorch and accelerate are not both installed: {missing}")
    if not torch.cuda.is_available():
        not_possible("PyTorch sees no GPU")
    wanted, our_pass = ours(arguments.results)
    if wanted is None:
        record("note", text="the oversized part did not run: 8 GB are taken, and there is no ratio")
    count = int((wanted or 8e9) // (ROWS * COLS * 2))
    available = next(int(line.split()[1]) << 10 for line in open("/proc/meminfo") if line.startswith("MemAvailable"))
    if count * ROWS * COLS * 2 > 0.8 * available:
        not_possible(f"a model of {count} tensors does not fit {available / 2**30:.0f} GiB of free memory")

    class Dense(torch.nn.Module):
        def __init__(self):
            super().__init__()
            with torch.device("meta"):
                linear = [torch.nn.Linear(COLS, ROWS, bias=False, dtype=torch.bfloat16) for _ in range(count)]
            self.layers = torch.nn.ModuleList(linear)

        def forward(self, x):
            for layer in self.layers:
                y = layer(x)
            return y

    model = Dense()
    values = torch.randn(ROWS, COLS, dtype=torch.float32).to(torch.bfloat16)
    for layer in model.layers:
        layer.weight = torch.nn.Parameter(values.clone(), requires_grad=False)
    model = peer.cpu_offload(model, execution_device=torch.device("cuda:0"))
    x = torch.randn(TOKENS, COLS, device="cuda:0", dtype=torch.float32).to(torch.bfloat16)
    seconds = []
    with torch.no_grad():
        for at in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(x)
            torch.cuda.synchronize()
            if at:
                seconds.append(time.perf_counter() - begin)
    record("chosen", name="peer", value=f"accelerate {peer.__version__} cpu_offload, PyTorch {torch.__version__}, weights in ordinary host memory")
    number("pass", "s", seconds)
    number("weights used", "GB/s", [count * ROWS * COLS * 2 / s / 1e9 for s in seconds])
    if our_pass:
        number("accelerate's pass / ours, of the same weights", "ratio", [s / our_pass for s in seconds])


PARTS = {
    "device-suite": device_suite,
    "runtime-suite": runtime_suite,
    "kernels": kernels,
    "sanitizer": sanitizer,
    "generate": generate,
    "accelerate": accelerate,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    for name in ["bundle", "scale", "dir", "results"]:
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    PARTS[arguments.part](arguments)


if __name__ == "__main__":
    main()
