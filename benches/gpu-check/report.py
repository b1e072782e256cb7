#!/usr/bin/env python3
"""Keeps the results of a GPU check, prints them as a table, and compares two of them. Standard library only.

    report.py start RESULTS --scale SCALE --bundle DIR  begin a results file
    report.py order PART:LIMIT...                       print the parts in the order in which they are to run
    report.py run RESULTS PART ... -- COMMAND           run a part under its limit, and add what it printed
    report.py add RESULTS PART --skipped WHY            add a part that did not run
    report.py table RESULTS                             print it; ends with 1 if a part did not run or missed a verdict
    report.py compare NEW OLD                           print new / old for every number that both have
    report.py libraries                                 print the folders in which Python packages keep CUDA libraries
"""

import argparse
import datetime
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import limits

NOT_POSSIBLE = 3
# Parts that need more than a GPU and its driver: PyTorch, llama.cpp, NVIDIA's tools. If any other part is not possible
# on a GPU, the check has shown less than it should.
MAY_BE_ABSENT = ("accelerate", "torch-decode", "torch-stream", "llama", "ncu", "soak-sanitized")
# Whose numbers a part is compared with: that one comes first.
NEEDS = {"torch-stream": "oversized", "accelerate": "oversized"}
# Says what the others depend on, so it is never put behind them.
ALWAYS_FIRST = "machine"
# Smaller changes of a number are not marked.
NOTICED = 0.05


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def save(path, results):
    """Replaces the file at once, so that a reader never sees half of it."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1, sort_keys=False)
        file.write("\n")
    os.replace(partial, path)


def first_line(command):
    if not shutil.which(command[0]):
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def start(arguments):
    bundle = Path(arguments.bundle)
    built = (bundle / "BUILD").read_text().strip() if (bundle / "BUILD").exists() else None
    fields = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit"
    results = {
        "format": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "scale": arguments.scale,
        "sources": sources(arguments.bundle),
        "built_from": built,
        "gpu": arguments.gpu,
        "nvidia_smi": first_line(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]),
        "parts": {},
    }
    save(arguments.results, results)


def sources(bundle):
    """A hash of what each part is made of, by part."""
    file = Path(bundle) / "SOURCES"
    return load(file) if file.exists() else {}


def passed(part):
    return part["status"] == "ok" and all(
        verdict["pass"] and not verdict.get("not_judged") for verdict in part.get("verdicts", {}).values())


def order(arguments):
    """What passed on a card with the sources it has here goes behind the others."""
    now, shown = sources(arguments.bundle), set()
    for file in (Path(arguments.bundle) / "previous").glob("gpu-*.json"):
        results = load(file)
        if (results["scale"] == "tiny") != (arguments.scale == "tiny"):
            continue
        shown |= {name for name, part in results["parts"].items()
                  if passed(part) and part.get("sources") and part["sources"] == now.get(name)}
    shown -= {ALWAYS_FIRST}
    names = [part.split(":")[0] for part in arguments.parts]
    shown -= {needed for name, needed in NEEDS.items() if name in names and name not in shown}
    print(*sorted(arguments.parts, key=lambda part: part.split(":")[0] in shown))


def status_of(status, errors):
    """How a part ended, and why, in its own words."""
    said = " / ".join(line for line in errors.strip().splitlines()[-4:])
    if status == 0:
        return "ok", None
    if status == NOT_POSSIBLE:
        return "not possible", said or "it does not say why"
    return "failed", said or f"it ended with {status} and said nothing"


def run(arguments):
    """Runs a part. What it prints goes to two files, and then into the results."""
    # Asked to end, it ends what it runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    begin = time.monotonic()
    with open(arguments.records, "wb") as out, open(arguments.errors, "wb") as errors:
        status, hung = limits.run(arguments.what, arguments.limit, out, errors)
    seconds = time.monotonic() - begin
    if hung is None:
        word, error = status_of(status, Path(arguments.errors).read_text(errors="replace"))
    else:
        word, error = "stopped", f"it took longer than {arguments.limit} s: {hung}"
    add_part(arguments, word, error, seconds)


def add(arguments):
    results = load(arguments.results)
    results["parts"][arguments.part] = {"status": "skipped", "error": arguments.skipped}
    save(arguments.results, results)


def add_part(arguments, word, error, seconds):
    results = load(arguments.results)
    part = {"status": word, "seconds": round(seconds, 3), "sources": results["sources"].get(arguments.part)}
    if error:
        part["error"] = error
    part.update({"chosen": {}, "numbers": {}, "verdicts": {}, "notes": []})
    for line in Path(arguments.records).read_text(errors="replace").splitlines():
        # A part that was stopped may have left half a line; test programs print other lines.
        try:
            record = json.loads(line)
            kind, name = record.pop("record", None), record.pop("name", None)
        except (ValueError, AttributeError, TypeError):
            continue
        if kind == "number":
            part["numbers"][name] = record
        elif kind == "verdict":
            part["verdicts"][name] = record
        elif kind == "chosen":
            part["chosen"][name] = record["value"]
        elif kind == "note":
            part["notes"].append(record["text"])
    results["parts"][arguments.part] = part
    save(arguments.results, results)
    print(f"{arguments.part}: {word}, {seconds:.0f} s" + (f": {error}" if error else ""), flush=True)


def amount(value, unit):
    if unit == "bytes":
        return f"{value / 2**30:.3f} GiB" if value >= 2**29 else f"{value / 2**20:.1f} MiB"
    if unit in ("count", "tests", "errors"):
        return f"{value:.0f}" if value == round(value) else f"{value:.2f}"
    if unit == "ratio":
        return f"{value:.3f}"
    if unit == "relative":
        return f"{value:.1e}"
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:.{digits}f} {unit}"


def goal_text(verdict):
    (sense, goal), = verdict["goal"].items()
    return f"{'>=' if sense == 'at_least' else '<='} {amount(goal, verdict['unit'])}"


def table(arguments):
    results = load(arguments.results)
    print(f"GPU check of {results['date']}, scale {results['scale']}, built from {results['built_from']}")
    if results["scale"] == "tiny":
        print("These are the sizes of a test: the numbers mean nothing.")
    print(f"GPU: {results.get('gpu')}")
    if results["nvidia_smi"]:
        print(f"nvidia-smi: {results['nvidia_smi']}")
    missed, failed, met, unjudged = [], [], 0, []
    for name, part in results["parts"].items():
        took = f", {part['seconds']:.0f} s" if "seconds" in part else ""
        print(f"\n== {name}: {part['status']}{took}")
        if part.get("error"):
            print(f"   {part['error']}")
        for what, value in part.get("chosen", {}).items():
            print(f"   {what}: {value}")
        numbers = part.get("numbers", {})
        width = max((len(what) for what in numbers), default=0)
        for what, number in numbers.items():
            text = amount(number["median"], number["unit"])
            if number["rounds"] > 1:
                text += f"  [{amount(number['least'], number['unit'])} - {amount(number['most'], number['unit'])}]"
            ceiling = numbers.get(number.get("ceiling"))
            if ceiling and ceiling["median"]:
                text += f"  {number['median'] / ceiling['median']:.3f} of '{number['ceiling']}'"
            print(f"   {what:{width}}  {text}")
        for note in part.get("notes", []):
            print(f"   note: {note}")
        for what, verdict in part.get("verdicts", {}).items():
            why_not = verdict.get("not_judged")
            word = "not judged" if why_not else "met   " if verdict["pass"] else "MISSED"
            print(f"   {word} {what}: {amount(verdict['value'], verdict['unit'])}, wanted {goal_text(verdict)}")
            print(f"          = {verdict['formula']}")
            if why_not:
                print(f"          {why_not}")
                unjudged.append(f"{name}: {what}")
                continue
            met += verdict["pass"]
            if not verdict["pass"]:
                missed.append(f"{name}: {what}")
        absent = part["status"] == "not possible" and name not in MAY_BE_ABSENT
        if absent or part["status"] in ("failed", "stopped", "skipped"):
            failed.append(f"{name} ({part['status']})")
    print(f"\n{met} verdicts met, {len(missed)} missed{': ' if missed else ''}{'; '.join(missed)}")
    if unjudged:
        print(f"not judged: {'; '.join(unjudged)}")
    if failed:
        print(f"parts that did not end: {', '.join(failed)}")
    return 1 if missed or failed else 0


def compare(arguments):
    new, old = load(arguments.new), load(arguments.old)
    print(f"\n== new / old: {new['date']} ({new['built_from']}) / {old['date']} ({old['built_from']})")
    if new["scale"] != old["scale"]:
        print(f"   the scales differ, {new['scale']} and {old['scale']}: only rates and ratios can be compared")
    for name, part in new["parts"].items():
        before = old["parts"].get(name)
        if before is None:
            print(f"{name}: only in the new results")
            continue
        if part["status"] != before["status"]:
            print(f"{name}: {part['status']}, was {before['status']}")
        for what, number in part.get("numbers", {}).items():
            was = before.get("numbers", {}).get(what)
            if was is None or was["unit"] != number["unit"] or not was["median"]:
                continue
            ratio = number["median"] / was["median"]
            # The ranges of the rounds do not overlap, and the change is more than a little.
            apart = number["least"] > was["most"] or number["most"] < was["least"]
            mark = "  <--" if apart and abs(ratio - 1) > NOTICED else ""
            now, then = amount(number["median"], number["unit"]), amount(was["median"], was["unit"])
            print(f"   {ratio:6.3f}  {name}: {what}: {now} / {then}{mark}")
        for what, verdict in part.get("verdicts", {}).items():
            was = before.get("verdicts", {}).get(what)
            if was is not None and was["pass"] != verdict["pass"]:
                words = {True: "met", False: "MISSED"}
                print(f"   verdict {name}: {what}: {words[verdict['pass']]}, was {words[was['pass']]}")
    for name in old["parts"]:
        if name not in new["parts"]:
            print(f"{name}: only in the old results")
    return 0


def libraries(_):
    patterns = [os.path.join(place, "nvidia", "*", "lib") for place in sys.path if place] + ["/usr/local/cuda*/lib64"]
    places = [folder for pattern in patterns for folder in sorted(glob.glob(pattern))]
    wanted = ["libcublas.so*", "libcublasLt.so*", "libcudart.so*", "libnvrtc.so*"]
    print(":".join(folder for folder in places if any(glob.glob(os.path.join(folder, name)) for name in wanted)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("start")
    command.add_argument("results")
    command.add_argument("--scale", required=True)
    command.add_argument("--bundle", required=True)
    command.add_argument("--gpu")
    command.set_defaults(run=start)
    command = commands.add_parser("order")
    command.add_argument("parts", nargs="+")
    command.add_argument("--bundle", required=True)
    command.add_argument("--scale", required=True)
    command.set_defaults(run=order)
    command = commands.add_parser("run")
    command.add_argument("results")
    command.add_argument("part")
    command.add_argument("--limit", type=int, required=True)
    command.add_argument("--records", required=True)
    command.add_argument("--errors", required=True)
    command.add_argument("what", nargs="+")
    command.set_defaults(run=run)
    command = commands.add_parser("add")
    command.add_argument("results")
    command.add_argument("part")
    command.add_argument("--skipped", required=True)
    command.set_defaults(run=add)
    command = commands.add_parser("table")
    command.add_argument("results")
    command.set_defaults(run=table)
    command = commands.add_parser("compare")
    command.add_argument("new")
    command.add_argument("old")
    command.set_defaults(run=compare)
    commands.add_parser("libraries").set_defaults(run=libraries)
    arguments = parser.parse_args()
    return arguments.run(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
