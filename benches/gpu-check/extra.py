#!/usr/bin/env python3
"""The parts of the GPU check that are no probes: test binaries, children, NVIDIA's tools, `generate`, the peers.

Called by run.sh as `extra.py PART --bundle DIR --scale SCALE --dir DIR --results FILE --seconds N`. Prints records as
gpu-probe does, one JSON object a line. Ends with 1 if the part failed, and with 3 if the machine or the bundle has not
what it needs.
"""

import argparse
import csv
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import limits

NOT_POSSIBLE = 3


def record(kind, **fields):
    print(json.dumps({"record": kind, **fields}), flush=True)


def number(name, unit, rounds, ceiling=None):
    if not rounds:
        return
    fields = {"median": statistics.median(rounds), "least": min(rounds), "most": max(rounds), "rounds": len(rounds)}
    record("number", name=name, unit=unit, **fields, **({"ceiling": ceiling} if ceiling else {}))


def verdict(name, value, unit, goal, formula, not_judged=None):
    (sense, bound), = goal.items()
    met = value >= bound if sense == "at_least" else value <= bound
    why = {"not_judged": not_judged} if not_judged else {}
    record("verdict", name=name, value=value, unit=unit, goal=goal, formula=formula, **{"pass": met}, **why)


def not_possible(why):
    print(why, file=sys.stderr)
    sys.exit(NOT_POSSIBLE)


def fail(why):
    print(why, file=sys.stderr)
    sys.exit(1)


def run(command, **environment):
    """What a command printed, both streams, and its status."""
    command = [str(part) for part in command]
    merged = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=merged)
    return done.returncode, done.stdout, done.stderr


def run_within(seconds, command, **environment):
    """The same, under a limit. If it took longer, the fourth thing says where it hung."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        status, hung = limits.run(command, seconds, out, errors, {**os.environ, **environment})
        texts = []
        for stream in (out, errors):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return status, *texts, hung


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


NOTHING_SHOWN = "nothing was shown"


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
        why = f"{name}: {passed} tests passed, of which {len(skipped)} were skipped: {NOTHING_SHOWN}"
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
TEST_SECONDS = {"full": 12, "quick": 12, "tiny": 3}


def device_suite(arguments):
    """Runs the tests one by one, each in a process of its own, so that one that hangs is named and ends the others not."""
    path = binary(arguments, "device")
    status, out, errors = run([path, "suite::cuda_real", "--list"], OUTCORE_REAL_CUDA="1")
    names = re.findall(r"^(\S+): test$", out, re.M)
    if status or not names:
        fail(f"the tests cannot be listed: {errors.strip()}")
    passed, wrong, skipped, seconds = 0, [], 0, TEST_SECONDS[arguments.scale]
    for name in names:
        command = [path, "--exact", name, "--test-threads=1", "--show-output"]
        status, out, errors, hung = run_within(seconds, command, OUTCORE_REAL_CUDA="1")
        skips = report_skipped(out + errors)
        skipped += len(skips)
        passed += status == 0 and not skips
        if hung is not None:
            wrong.append(f"{name} did not end within {seconds} s ({hung})")
        elif status:
            wrong.append(f"{name} failed")
        if status:
            print(out[-2000:], errors[-20000:], sep="\n", file=sys.stderr)
    number("suite: tests passed", "tests", [passed])
    number("suite: tests failed", "tests", [len(wrong)])
    if wrong:
        fail("; ".join(wrong))
    if not passed:
        fail(f"{len(names)} tests, of which {skipped} were skipped: {NOTHING_SHOWN}")
    if skipped:
        fail(f"suite skipped {skipped} tests")


def runtime_suite(arguments):
    tests(arguments, "cuda::cuda_real", "pins_on_streams::cuda_real")


# What is computed on the GPU, compared with the CPU: binary, module, and the lines whose largest error is judged. For
# some types of weights the CPU rounds activations to eight bits; the GPU never does. What cuBLASLt multiplies is in
# f16, or in bf16 where BF16 weights are multiplied in place.
ROUNDED = "types for which the CPU rounds activations to eight bits"
ERRORS = [
    (
        "kernels",
        "cuda::",
        {
            "1e-5": ("kernels against sums in f64", 1e-3),
            "5e-4": ("cuBLASLt against sums in f64, f16", 5e-4),
            "4e-3": ("cuBLASLt against sums in f64, bf16 in place", 4e-3),
        },
    ),
    (
        "forward",
        "on_a_gpu",
        {
            "1e-3": ("logits against the CPU's, weights in f32, f16, bf16 and types whose activations are not rounded", 1e-3),
            "3e-2": (f"logits against the CPU's, {ROUNDED}", 3e-2),
        },
    ),
    (
        "prompts",
        "on_a_gpu",
        {
            "2e-3": ("logits of prompts with cuBLASLt against the CPU's, f16", 2e-3),
            "1e-2": ("logits of prompts with cuBLASLt against the CPU's, bf16 in place", 1e-2),
            "3e-2": (f"logits of prompts with cuBLASLt against the CPU's, {ROUNDED}", 3e-2),
        },
    ),
]
# What a test says that skips because the library is not there, which is no failure.
NO_CUBLASLT = "there is no cuBLASLt"


def compiled_kernels(arguments):
    """The file of kernels of `generate` that were compiled beforehand, if the bundle has one."""
    folder = Path(arguments.bundle) / "kernels"
    return next((file for file in [folder / f"kernels.{ending}" for ending in ["fatbin", "cubin", "ptx"]] if file.is_file()), None)


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
        record("note", text="no compiled kernels are in this bundle: NVRTC compiles them, or the driver the program's own PTX")
    reasons = []
    for name, module, wanted in ERRORS:
        out, skipped, why = run_tests(name, binary(arguments, name), module, 1, **environment)
        absent = any(NO_CUBLASLT in line for line in skipped)
        # Without the library, all tests of one program skip.
        reasons += [why] if why and not (absent and why.endswith(NOTHING_SHOWN)) else []
        found = re.findall(r"^relative error (\S+), (\S+) allowed: (.*)$", out, re.M)
        for allowed, (what, most) in wanted.items():
            errors = [(finite(error), case) for error, bound, case in found if bound == allowed]
            if not errors and absent and "cuBLASLt" in what:
                record("note", text=f"{what}: not judged, because there is no cuBLASLt here")
                continue
            if not errors:
                reasons.append(f"{name}: nothing was compared within {allowed}")
                continue
            largest, case = max(errors)
            record("chosen", name=f"largest error, {what}", value=f"{largest:.2e} of {len(errors)}: {case}")
            formula = "length of the difference / length of what is right; largest of all that were compared"
            verdict(what, largest, "relative", {"at_most": most}, formula)
    reasons += updates(arguments)
    if reasons:
        fail("; ".join(reasons))


def updates(arguments):
    """Updates of parameters by kernels: the bits of the host, also in a durable folder, which lies where files may."""
    environment = {"OUTCORE_TEST_GPU": "0", "TMPDIR": arguments.dir}
    file = Path(arguments.bundle) / "kernels/train.fatbin"
    if file.exists():
        environment["OUTCORE_TEST_KERNELS"] = str(file)
    _, _, why = run_tests("updates", binary(arguments, "updates"), "_a_gpu", 1, **environment)
    return [why] if why else []


def tool(name):
    """One of NVIDIA's tools."""
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if not path:
        not_possible(f"{name} is not installed")
    return path


def probe_options(arguments):
    memory = ["--memory", arguments.memory] if arguments.memory else []
    return ["--scale", arguments.scale, "--dir", arguments.dir, *memory]


def soak_sanitized(arguments):
    """A piece of the soak, with every access of its kernels checked."""
    sanitizer, probe = tool("compute-sanitizer"), binary(arguments, "gpu-probe")
    if "soak" not in run([probe, "parts"])[1].split():
        not_possible("this gpu-probe has no part soak")
    folder = Path(arguments.dir) / "sanitizer"
    folder.mkdir(exist_ok=True)
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "99", probe, "run", "soak", "--scale", "tiny", "--dir", folder]
    status, out, errors = run(command)
    text = out + errors
    if "Device not supported" in text or "Unable to" in text and "ERROR SUMMARY" not in text:
        not_possible("compute-sanitizer cannot be used here: " + text.strip().splitlines()[0])
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    if not found:
        print(text[-4000:], file=sys.stderr)
        fail(f"compute-sanitizer did not end: status {status}")
    verdict("errors found", int(found.group(1)), "errors", {"at_most": 0}, "compute-sanitizer's own count")
    if status:
        print(text[-6000:], file=sys.stderr)
        fail(f"the soak under compute-sanitizer: {found.group(0)}, status {status}")


# ---- children ----

# What a process prints right before it leaves `main` with a live runtime. As in children.rs.
LEAVING = "leaving main"
CHILD_SECONDS = 30


def passed_on(scenario, out):
    """Passes a child's records on under its name."""
    for line in out.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            if "name" in found:
                found["name"] = f"{scenario}: {found['name']}"
            print(json.dumps(found), flush=True)


def leaves_main(command):
    """Starts a child that leaves `main` while a pass runs. Its status, its errors, and how long it took to go."""
    child = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             errors="replace", stdin=subprocess.DEVNULL)
    left = None
    for line in child.stdout:
        if line.strip() == LEAVING:
            left = time.perf_counter()
            break
    try:
        _, errors = child.communicate(timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        text, words = limits.where(child.pid)
        limits.end(child.pid, child)
        print(text, file=sys.stderr)
        fail(f"leaked-exit: a child that left main did not end: {words}")
    if left is None:
        print(errors, file=sys.stderr)
        fail(f"leaked-exit: a child ended with {child.returncode} before it left main: {errors.strip()}")
    # The emulated driver prints what is not given back, which here is everything.
    said = [line for line in errors.splitlines() if line.strip() and not line.startswith("fake CUDA: ")]
    return child.returncode, said, time.perf_counter() - left


def children(arguments):
    probe = binary(arguments, "gpu-probe")
    tiny, wrong = arguments.scale == "tiny", []
    for scenario in run([probe, "children"])[1].split():
        command = [probe, "child", scenario, *probe_options(arguments)]
        if scenario != "leaked-exit":
            status, out, errors, hung = run_within(CHILD_SECONDS, command)
            passed_on(scenario, out)
            if status:
                print(errors[-20000:], file=sys.stderr)
                said = errors.strip().splitlines()
                wrong.append(f"{scenario}: {hung or (said[-1] if said else f'status {status}')}")
            continue
        ended = [leaves_main(command) for _ in range(2 if tiny else 5 if arguments.scale == "quick" else 20)]
        number(f"{scenario}: from leaving main to the end", "s", [seconds for _, _, seconds in ended])
        verdict(f"{scenario}: the slowest", max(seconds for _, _, seconds in ended), "s", {"at_most": 1},
                "from leaving main, while a pass runs and nothing is closed, to the end of the process")
        clean = sum(status == 0 and not said for status, said, _ in ended)
        verdict(f"{scenario}: clean", clean / len(ended), "ratio", {"at_least": 1},
                "children that ended with status 0 and printed no error / all")
        for status, said, _ in ended:
            if status or said:
                record("note", text=f"{scenario}: status {status}: {' / '.join(said[:3])}")
    if wrong:
        fail("; ".join(wrong))


# ---- models ----

# Room for prompts of 8,000 tokens and answers to them.
CONTEXT = ["--context", 16384]
# SmolLM2-135M's layers, width, heads and so on. Its own file is larger than a bundle may be.
SMOLLM2 = ["--layers", 30, "--dim", 576, "--heads", 9, "--kv-heads", 3, "--ffn", 1536, "--vocab", 49152, "--tied", "--dtype", "Q4_1"]
# Name, options of make_model, file, and the tokens a second that an H100 has to reach with all of it resident.
SMALL = ("SmolLM2-135M's shape, Q4_1", [*SMOLLM2, *CONTEXT], "small.gguf", 2000)
LARGE = ("1.2 GB Q8_0", CONTEXT, "large.gguf", 1350)
# What an H100 has to reach with the large model through a quarter of it.
STREAMED_GOAL = 53
JUDGED_CARD = "H100"
# Repeats that count, those before them that do not, tokens of each.
REPEATS, WARM, TOKENS = 5, 2, 128
PROMPTS = (512, 2048)
LONG_CONTEXT = 8000
# Per token, if `generate` prints them: where the time goes.
WORK = {
    "launches": "count", "graph_launches": "count", "graph_nodes": "count", "synchronisations": "count",
    "host_seconds": "s", "gpu_seconds": "s", "waiting_seconds": "s", "device_bytes": "bytes", "bandwidth_share": "ratio",
}
# What decoding aims at, of the card's bandwidth. It is noted, not judged.
SHARE_AIM = 0.5


def card(arguments):
    """The name of the GPU, as the run's results have it."""
    results = Path(arguments.results)
    return (json.loads(results.read_text()).get("gpu") or "") if results.exists() else ""


def made(arguments, model):
    """The file of a model, made if it is not there. It stays for the parts behind this one."""
    _, options, file, _ = model
    path = Path(arguments.dir) / file
    if not path.exists():
        status, _, errors = run([binary(arguments, "make_model"), path, *options])
        if status:
            fail(f"make_model: {errors.strip()}")
    return path


def field(found, name):
    """A field of generate's object, at its top or one object deep; None where it is absent."""
    places = [found, *(value for value in found.values() if isinstance(value, dict))]
    return next((place[name] for place in places if isinstance(place.get(name), (int, float))), None)


class Generate:
    """`generate` on the GPU, with what this bundle has."""

    def __init__(self, arguments):
        self.program = binary(arguments, "generate")
        _, self.usage, _ = run([self.program, "--help"])
        if "cuda" not in self.usage:
            not_possible("the generate of this bundle has no CUDA device")
        self.kernels = compiled_kernels(arguments)
        if not self.kernels:
            record("note", text="no compiled kernels are in this bundle: generate compiles them with NVRTC, or uses its own PTX")
        self.until = time.monotonic() + arguments.seconds - 3

    def repeats_itself(self):
        return "--repeat" in self.usage

    def hash_of(self, what, *options):
        """A hash of every logit of a run of its own: to have one, all logits are copied to the host."""
        asked = ["--logits-hash"] if "--logits-hash" in self.usage else []
        found = self.once(what, *options, *asked)["logits_xxh3"]
        return found or fail(f"{what}: generate printed no hash of its logits")

    def left(self, what):
        """Whether there is time for something; if not, says so."""
        if time.monotonic() < self.until:
            return True
        record("note", text=f"no time was left for: {what}")
        return False

    def command(self, path, tokens, prompt, device, host, *more):
        ids = ",".join(str(1 + at * 7 % 999) for at in range(prompt))
        command = [self.program, "--model", path, "--prompt-tokens", ids, "--tokens", tokens, "--device", "cuda", "--json",
                   "--device-budget", device, "--host-budget", host, *more]
        return command + (["--kernels", self.kernels] if self.kernels and "--kernels" in self.usage else [])

    def once(self, what, *options):
        status, out, errors = run(self.command(*options))
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if status or not lines:
            print(errors[-4000:], file=sys.stderr)
            fail(f"generate on {what}: status {status}")
        found = json.loads(lines[-1])
        if found["peak_device_bytes"] > found["device_budget_bytes"]:
            fail(f"{what}: more in frames than the budget")
        return found

    def repeated(self, what, repeats, warm, path, tokens, prompt, device, host, *more):
        """Several runs of one kind: the last one's object, and of each that counts the time to the first token, tokens
        a second and the pass. In one process if generate can; else the first token also waits for the disk, and says
        nothing of the prompt."""
        if self.repeats_itself():
            found = self.once(what, path, tokens, prompt, device, host, *more, "--repeat", repeats + warm)
            return found, found["repeats"][warm:]
        for _ in range(warm):
            self.once(what, path, min(tokens, 16), prompt, device, host, *more)
        runs = [self.once(what, path, tokens, prompt, device, host, *more) for _ in range(repeats)]
        return runs[-1], runs


def budgets(path):
    """Device and host budgets with which all of a model is resident, and with which a quarter is."""
    size = path.stat().st_size
    # At least what the largest tensors take together with the pages that are filled ahead.
    quarter = max(size // 4, 64 << 20)
    return (size + (256 << 20), 0), (quarter, size + (64 << 20))


def report_work(name, found, runs, resident):
    """Where the time of a token goes, as far as generate says: of each run, or of the last one where only that has it."""
    absent = []
    for what, unit in WORK.items():
        values = [value for value in (field(one, what) for one in runs) if value is not None] or [field(found, what)]
        if values == [None]:
            absent.append(what)
        else:
            number(f"{name}: {what} a token", unit, values)
    if absent:
        record("note", text=f"{name}: absent from generate's object: {', '.join(absent)}")
    number(f"{name}: waiting for weights, of all passes", "s", [found["stall_s"]])
    share = field(found, "bandwidth_share")
    if resident and share is not None:
        record("note", text=f"{name}: decoding reads at {share:.0%} of the GPU's bandwidth, and aims at {SHARE_AIM:.0%} or more")


def report_stalls(program, name, *options):
    """Of the time of a token on the GPU, how long its stream waits for weights. A run of its own: the events that time
    this are no part of what is judged."""
    if "--time-stalls" not in program.usage or not program.left(f"{name}: waits of the GPU's stream for weights"):
        return
    found = program.once(name, *options, "--time-stalls")
    stalled, gpu = field(found, "gpu_stall_seconds"), field(found, "gpu_seconds")
    if stalled is None or not gpu:
        record("note", text=f"{name}: this driver does not time what the GPU's stream waits for")
        return
    number(f"{name}: gpu_stall_seconds a token", "s", [stalled])
    number(f"{name}: waiting for weights, of the time on the GPU", "ratio", [stalled / gpu])


def streamed(name, runs, short, long):
    """What a pass over a model moves that is larger than the budget: two runs of different length differ by passes of
    one token only."""
    tokens = len(long["tokens"]) - len(short["tokens"])
    moved = (long["link_bytes"] - short["link_bytes"]) / max(tokens, 1)
    busy = (long["link_busy_s"] - short["link_busy_s"]) / max(tokens, 1)
    seconds = statistics.median(one["pass_s_median"] for one in runs)
    number(f"{name}: bytes over the link, of a token", "bytes", [moved])
    least = long["pass_bytes"] - long["device_budget_bytes"] + 3 * long["page_bytes"]
    verdict(f"{name}: bytes over the link", moved / least, "ratio", {"at_most": 1},
            "bytes of a token / (weights of a pass - budget + 3 pages)")
    verdict(f"{name}: link busy", busy / seconds, "ratio", {"at_least": 0.97}, "time in which the link moves weights / pass")


def of_model(arguments, program, model):
    """A model resident and through a quarter, with the usual pages and with those of 2 MiB."""
    name, _, _, goal = model
    tiny = arguments.scale == "tiny"
    path, tokens = made(arguments, model), 8 if tiny else TOKENS
    repeats, warm = (1, 0) if tiny else (REPEATS, WARM)
    judged = JUDGED_CARD in card(arguments)
    hashes, passes = {}, {}
    for where, (device, host) in zip(("all resident", "a quarter on the GPU"), budgets(path)):
        for pages, more in (("", []), (", pages of 2 MiB", ["--page-size", "2MiB"])):
            what = f"{name}, {where}{pages}"
            if pages and not program.left(what):
                continue
            # Pages of 2 MiB are no verdict's.
            counts = (repeats, warm) if not pages else (1, 0 if tiny else 1)
            with Clock(arguments) as clock:
                long, runs = program.repeated(what, *counts, path, tokens, 8, device, host, *more)
            number(f"{what}: clock under load", "MHz", clock.busy)
            number(f"{what}: tokens a second", "tok/s", [one["decode_tok_s"] for one in runs])
            number(f"{what}: pass", "s", [one["pass_s_median"] for one in runs])
            hashes[what] = program.hash_of(what, path, 8 if tiny else 32, 8, device, host, *more)
            if pages:
                continue
            passes[where] = statistics.median(one["pass_s_median"] for one in runs)
            report_work(what, long, runs, where == "all resident")
            if where != "all resident":
                report_stalls(program, what, path, 2 if tiny else 16, 8, device, host)
            rate, wanted = statistics.median(one["decode_tok_s"] for one in runs), goal if where == "all resident" else STREAMED_GOAL
            if judged and (where == "all resident" or model is LARGE):
                verdict(f"{what}: tokens a second", rate, "tok/s", {"at_least": wanted}, f"median of {len(runs)} runs", clock.moved())
            if where != "all resident" and model is LARGE:
                short = program.once(what, path, 2 if tiny else 16, 8, device, host)
                one = program.once(what, path, tokens, 8, device, host) if program.repeats_itself() else long
                streamed(what, runs, short, one)
    if not judged:
        record("note", text=f"tokens a second are judged on an {JUDGED_CARD} only")
    one, other = passes.values()
    number(f"{name}: pass, a quarter on the GPU / all resident", "ratio", [other / one])
    same = float(len(set(hashes.values())) == 1)
    verdict(f"{name}: same logits", same, "ratio", {"at_least": 1}, f"1 if every logit of {len(hashes)} kinds of runs has the same bits")


def prompt_rate(program, what, path, prompt, repeats, warm):
    """Tokens of a prompt a second, with all weights resident before; None if generate cannot repeat itself."""
    if not program.repeats_itself():
        return None
    resident, _ = budgets(path)
    _, runs = program.repeated(what, repeats, warm, path, 1, prompt, *resident)
    return [prompt / one["ttft_s"] for one in runs]


def generate(arguments):
    program, tiny = Generate(arguments), arguments.scale == "tiny"
    real = os.environ.get("OUTCORE_MODEL")
    small = SMALL
    if real:
        small = (Path(real).name, [], real, SMALL[3])
    else:
        record("note", text="SmolLM2's own file is larger than a bundle may be: a synthetic model of its shape stands in (OUTCORE_MODEL names a file)")
    of_model(arguments, program, LARGE)
    if program.left(small[0]):
        of_model(arguments, program, small)
    path = made(arguments, LARGE)
    resident, quarter = budgets(path)
    repeats, warm = (1, 0) if tiny else (REPEATS, WARM)
    if not program.repeats_itself():
        record("note", text="prompts: this generate has no --repeat, so the time of a prompt is that of reading weights, too")
    for prompt in PROMPTS:
        what = f"{LARGE[0]}, a prompt of {prompt} tokens"
        rates = prompt_rate(program, what, path, prompt, repeats, warm) if program.left(what) else None
        if rates:
            number(f"{what}: tokens a second", "tok/s", rates)
    what = f"{LARGE[0]}, a context of {LONG_CONTEXT}"
    if program.left(what):
        found = program.once(what, path, 8 if tiny else 32, LONG_CONTEXT, *resident)
        number(f"{what}: tokens a second", "tok/s", [found["decode_tok_s"]])
    if program.left("--paged-kv"):
        hashes = []
        for where, (device, host) in (("all resident", resident), ("a quarter on the GPU", quarter)):
            # Room for keys and values beside the weights.
            options = (path, 8 if tiny else 32, 512, device + (256 << 20), host, "--paged-kv")
            found = program.once(f"--paged-kv, {where}", *options)
            number(f"{LARGE[0]}, --paged-kv, {where}: tokens a second", "tok/s", [found["decode_tok_s"]])
            # A library's sums may depend on how many rows of a matrix are there at once.
            own = ["--deterministic"] if "--deterministic" in program.usage else []
            hashes.append(program.hash_of(f"--paged-kv, {where}", *options, *own))
        verdict("--paged-kv: same logits", float(hashes[0] == hashes[1]), "ratio", {"at_least": 1}, "1 if every logit of both runs has the same bits")


# ---- clocks ----

# As in clocks.rs.
STEADY = 0.02
# Seconds between two readings.
PACE = 0.2


class Clock:
    """The clock of the multiprocessors while a block runs, read by a thread of its own. `busy` has what was read while
    the GPU computed, in MHz: a GPU that does nothing lowers its clock, and that says nothing of the block."""

    def __init__(self, arguments):
        self.busy, self.over, self.command = [], threading.Event(), None
        if shutil.which("nvidia-smi"):
            # By its address: the tool counts GPUs in another order than the driver.
            status, address, _ = run([binary(arguments, "gpu-probe"), "gpu", "--pci"])
            query = ["nvidia-smi", "--query-gpu=clocks.sm,utilization.gpu", "--format=csv,noheader,nounits"]
            self.command = [*query, "-i", address.strip()] if status == 0 and address.strip() else None
        self.reader = threading.Thread(target=self.read, name="clock", daemon=True)

    def __enter__(self):
        self.reader.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.reader.join()

    def read(self):
        while self.command:
            _, out, _ = run(self.command)
            found = re.match(r"\s*(\d+(?:\.\d+)?)\s*,\s*(\d+)\s*$", out)
            if found and float(found.group(1)) > 0 and int(found.group(2)) > 0:
                self.busy.append(float(found.group(1)))
            if self.over.wait(PACE):
                return

    def moved(self):
        """Why what was measured in the block is not judged: the clock moved, from the median of the first half of the
        readings to that of the second. So a card that raises its clock as the load begins counts as steady. With less
        than two readings it is taken to have been steady."""
        if self.command and len(self.busy) < 2:
            record("note", text=f"the clock was read {len(self.busy)} times under load, so it is not known whether it moved")
        if len(self.busy) < 2:
            return None
        half = len(self.busy) // 2
        before, after = statistics.median(self.busy[:half]), statistics.median(self.busy[-half:])
        if abs(after / before - 1) <= STEADY:
            return None
        return f"the clock moved from {before:.0f} to {after:.0f} MHz, by more than {STEADY:.0%}"


# ---- NVIDIA's profiler ----

# What a kernel is, what its name holds, and the tokens of the prompt in which it runs.
KERNELS = [
    ("decode, a product", "products_", 8),
    # Those of cuBLASLt, where it multiplies.
    ("prompt, a product", "products_|gemm|nvjet|cutlass|xmma", 512),
    ("attention", "attention_parts", 512),
]
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "bytes read",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "share of the memory's rate, in %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "share of the arithmetic rate, in %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, in %",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "warps that wait for memory, per issue",
}


def profiled(text):
    """The kernel and its metrics, by name, of ncu's table with commas."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines)) if lines else []
    found = {row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}".strip() for row in rows if "Metric Name" in row}
    return (rows[0].get("Kernel Name") if rows else None), found


def ncu(arguments):
    profiler, program, wrong = tool("ncu"), Generate(arguments), []
    path = made(arguments, LARGE)
    resident, _ = budgets(path)
    # Kernels one by one, which the profiler counts as they are launched.
    graphs = ["--no-graphs"] if "--no-graphs" in program.usage else []
    for what, names, prompt in KERNELS:
        # Not the first ones, which run with cold caches.
        command = [profiler, "--clock-control", "none", "--csv", "--kernel-name", f"regex:{names}", "--launch-skip", 20,
                   "--launch-count", 1, "--metrics", ",".join(METRICS), *program.command(path, 4, prompt, *resident, *graphs)]
        status, out, errors = run(command)
        kernel, metrics = profiled(out)
        if not metrics:
            print(out[-2000:], errors[-2000:], sep="\n", file=sys.stderr)
            wrong.append(f"{what}: ncu measured nothing (status {status})")
            continue
        record("chosen", name=what, value=kernel)
        for metric, name in METRICS.items():
            record("chosen", name=f"{what}: {name}", value=metrics.get(metric, "absent"))
    if wrong:
        fail("; ".join(wrong))


PARTS = {
    "device-suite": device_suite,
    "runtime-suite": runtime_suite,
    "kernels": kernels,
    "soak-sanitized": soak_sanitized,
    "children": children,
    "generate": generate,
    "ncu": ncu,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part")
    for name in ["bundle", "scale", "dir", "results"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--memory")
    arguments = parser.parse_args()
    if arguments.part in PARTS:
        return PARTS[arguments.part](arguments)
    # PyTorch is not loaded for anything else.
    import peers

    part = peers.PARTS.get(arguments.part) or not_possible(f"neither this bundle's gpu-probe nor extra.py has a part {arguments.part}")
    return part(arguments)


if __name__ == "__main__":
    # Under this name peers.py finds it, and does not load it twice.
    sys.modules["extra"] = sys.modules["__main__"]
    main()
