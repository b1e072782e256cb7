#!/usr/bin/env python3
"""Runs test programs, some at a time: run_tests.py [--jobs N] [--failures FILE] [CARGO ARGUMENT...] [-- ARGUMENT...]

The programs are those of `cargo test CARGO ARGUMENT... --no-run`, each run as cargo runs it, with what is behind `--`.
Cargo runs one after the other, and many of them wait for most of their time. N is the number of processors unless it is
given. What a program prints comes in one piece when it has ended. Exit status 1 if one has failed, after all have run.
The end of what a failed program printed is printed again behind everything else, or appended to FILE.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Those that take longest begin first, so that none of them is left alone at the end.
LONGEST = [
    "tests/runtime/main.rs",
    "runtime/pager/tests/pager/main.rs",
    "examples/llm/tests/cuda.rs",
    "runtime/cli/tests/run.rs",
    "tests/device/main.rs",
    "tests/process/main.rs",
    "tests/simulate/main.rs",
    "examples/llm/tests/generate.rs",
    "benches/gpu-check/tests/bundle.rs",
    "runtime/lab/lib.rs",
]
# Of what a failed program printed, this much is printed again.
MOST_LINES = 60


def programs(arguments):
    """The test programs, with the folder and the environment in which cargo runs them."""
    build = ["cargo", "test", *arguments, "--no-run", "--message-format", "json-render-diagnostics"]
    built = subprocess.run(build, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode:
        sys.exit(built.returncode)
    found = []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] != "compiler-artifact" or not message["profile"]["test"] or not message["executable"]:
            continue
        program, manifest = Path(message["executable"]), Path(message["manifest_path"])
        # `path+file:///FOLDER#VERSION`, or `...#NAME@VERSION` where the folder has another name.
        folder, _, version = message["package_id"].rpartition("#")
        package, _, version = version.rpartition("@")
        environment = {
            "CARGO_MANIFEST_DIR": str(manifest.parent),
            "CARGO_MANIFEST_PATH": str(manifest),
            "CARGO_PKG_NAME": package or folder.rpartition("/")[2],
            "CARGO_PKG_VERSION": version,
        }
        found.append((str(Path(message["target"]["src_path"]).relative_to(ROOT)), program, environment))
    return found


def run(program, environment, arguments, sysroot):
    """Runs a program: its exit status, what it printed, how long it took, and the processor time of it and its own."""
    libraries = [program.parent, program.parent.parent, sysroot, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {**os.environ, **environment, "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    package = environment["CARGO_MANIFEST_DIR"]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as said:
        command = [program, *arguments]
        done = subprocess.Popen(command, cwd=package, env=environment, stdout=said, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(done.pid, 0)
        done.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read().decode(errors="replace")
    return done.returncode, text, time.monotonic() - begun, usage.ru_utime + usage.ru_stime


def failures(text):
    """What a program printed of the tests that failed, or its last lines if it did not get so far."""
    return "\n".join((text.partition("\nfailures:\n")[2] or text).strip().splitlines()[-MOST_LINES:])


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--failures", type=Path)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, cargo = options.parse_known_args(sys.argv[1:split])
    found, behind = programs(cargo), sys.argv[split + 1 :]
    if not found:
        sys.exit("run_tests: there is no test program")
    found.sort(key=lambda program: LONGEST.index(program[0]) if program[0] in LONGEST else len(LONGEST))
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True).stdout.strip()
    todo, lock, failed = queue.SimpleQueue(), threading.Lock(), []
    for program in found:
        todo.put(program)

    def work():
        while True:
            try:
                name, program, environment = todo.get_nowait()
            except queue.Empty:
                return
            with lock:
                print(f"begun: {name}", flush=True)
            try:
                status, text, took, busy = run(program, environment, behind, f"{sysroot}/lib")
            except Exception as error:
                status, text, took, busy = 1, f"it could not be run: {error}", 0, 0
            with lock:
                times = f"{took:.1f} s, {busy:.1f} s of processor time"
                print(f"     Running {name} ({program.name})\n{text.rstrip()}\n{times}\n", flush=True)
                if status:
                    failed.append(f"error: test failed: {name}: status {status}\n{failures(text)}\n")

    workers = [threading.Thread(target=work) for _ in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if options.failures:
        with options.failures.open("a") as file:
            file.writelines(failed)
    else:
        print(*failed, sep="\n", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
