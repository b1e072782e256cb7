#!/usr/bin/env python3
"""What the tests catch: breaks one line of product code at a time, and runs the tests that should see it.

    breaks.py [--only TEXT] [--list] [--timeout SECONDS] [--out FILE [--go-on]] [--against FILE]

tests/breaks.json lists the breaks. Each names a file, a text that is there once, within one line, what is put in its
place, what is wrong then, and the arguments of `cargo test` that run the tests. `hard` marks those that only exhaustive
or stress tests can see. First every text is looked for; --list does no more. Then the tests run on the code as it is.
What fails there counts for nothing later. Then each break is made alone.

A break is caught if a test fails, or if a test program ends before its tests do; the programs behind it do not run.
Tests that take longer than --timeout SECONDS hang: they are ended with all that they have started, and the break counts
as caught. Compiling counts towards no limit. A break that does not compile is an error of the list.

It works in a git worktree of HEAD in target/breaks, which is made if it is missing, and whose changes are lost. What is
built stays in target/breaks-build, and what was printed in target/breaks-logs. Changes that are not committed take no
part, but for those of the list. A test that skips, for want of userfaultfd for example, catches nothing.

Prints a table in Markdown, and writes what became of each break, by its id, to --out FILE. --against FILE compares with
what an earlier run has written. With --go-on, breaks of which --out FILE says already what became of them are not made
again. Exit status 1: the list is wrong, a break does not compile, the tests do not run on the code as it is, or
something was caught in the earlier run and is not now. A break that is not caught is no failure.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from watch import end

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/breaks.json"
TARGET = ROOT / "target"
TREE, BUILD, LOGS = TARGET / "breaks", TARGET / "breaks-build", TARGET / "breaks-logs"

TEXTS = ("id", "file", "find", "replace", "what")
CAUGHT, HANGS, NOT_CAUGHT, NOT_COMPILED = "caught", "hangs", "NOT CAUGHT", "does not compile"
# How many of the tests that fail are named.
NAMED = 3

FAILED = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. FAILED", re.M)
# A test program that has failed, as cargo names it. And how it ended, if that was before its tests did.
PROGRAM = re.compile(r"^error: test failed, to rerun pass `(.*)`$", re.M)
ENDED = re.compile(PROGRAM.pattern + r"\n+Caused by:\n\s+process didn't exit successfully: .* \((.*)\)$", re.M)
RAN = re.compile(r"^running (\d+) tests?$", re.M)
ERROR = re.compile(r"^error(?:\[\w+\])?: .*", re.M)


def tell(text):
    print(f"breaks: {text}", file=sys.stderr, flush=True)


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"breaks: git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def wrong_form(one):
    """What is wrong with an entry of the list by itself, or nothing."""
    if not all(isinstance(one.get(key), str) for key in TEXTS):
        return f"it has not all of {', '.join(TEXTS)} as texts"
    if not re.fullmatch(r"[a-z0-9-]+", one["id"]):
        return "its id is not of small letters, digits and hyphens"
    tests = one.get("tests")
    if not isinstance(tests, list) or not tests or not all(isinstance(text, str) for text in tests):
        return "its tests are not a list of arguments"
    if not isinstance(one.get("hard", False), bool):
        return "`hard` is neither true nor false"
    if unknown := set(one) - {*TEXTS, "tests", "hard"}:
        return f"it has {', '.join(sorted(unknown))} besides"
    if not one["find"].strip() or "\n" in one["find"] or one["find"] == one["replace"]:
        return "it finds nothing, more than a line, or what it puts there"
    return None


def wrong_place(one, tree):
    """Why a break cannot be made in this tree, or nothing."""
    path = tree / one["file"]
    if not path.is_file():
        return f"there is no {one['file']}"
    count = path.read_text(encoding="utf-8").count(one["find"])
    return None if count == 1 else f"{one['file']} has its text {count} times"


def all_wrong(breaks, tree):
    """What is wrong with these breaks in this tree, with their ids."""
    wrong, seen = [], set()
    for one in breaks:
        name = one.get("id", "an entry without an id")
        why = wrong_form(one) or wrong_place(one, tree)
        if why is None and name in seen:
            why = "another one has its id"
        if why:
            wrong.append(f"{name}: {why}")
        seen.add(name)
    return wrong


def prepare():
    """Makes the worktree, or brings it to HEAD, without any change."""
    head = git(ROOT, "rev-parse", "HEAD")
    if not (TREE / ".git").exists():
        TARGET.mkdir(exist_ok=True)
        # Also where git knows it from before, and somebody has deleted it.
        git(ROOT, "worktree", "add", "--force", "--quiet", "--detach", TREE, head)
    git(TREE, "checkout", "--quiet", "--force", "--detach", head)


def cargo(arguments, log, limit=None):
    """Runs `cargo test` in the worktree; its exit status, or `None` if it took longer than `limit` seconds."""
    required = [name for name in os.environ.get("OUTCORE_REQUIRE", "").split(",") if name]
    env = {
        **os.environ,
        "CARGO_TARGET_DIR": str(BUILD),
        "CARGO_TERM_COLOR": "never",
        # The emulated driver is built with the tests that want it.
        "OUTCORE_REQUIRE": ",".join(dict.fromkeys([*required, "emulated"])),
    }
    with open(log, "ab") as out:
        process = subprocess.Popen(
            ["cargo", "test", *arguments],
            cwd=TREE,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Tests may have left something behind that still runs.
            end(process)
            process.wait()


class Run:
    """One run of tests: what was printed, and what that says."""

    def __init__(self, name, tests, limit, *flags):
        log, began = LOGS / f"{name}.log", time.monotonic()
        log.unlink(missing_ok=True)
        self.compiled = cargo(["--no-run", *tests], log) == 0
        self.error, self.status = None, None
        compiling = log.read_text(encoding="utf-8", errors="replace")
        if not self.compiled:
            found = ERROR.search(compiling)
            self.error = found.group(0) if found else f"no error that was understood; see {log}"
        else:
            self.status = cargo([*flags, *tests], log, limit)
        self.seconds = round(time.monotonic() - began)
        text = log.read_text(encoding="utf-8", errors="replace")[len(compiling) :]
        self.ran = sum(int(count) for count in RAN.findall(text))
        self.tests = list(dict.fromkeys(FAILED.findall(text)))
        self.programs = list(dict.fromkeys(PROGRAM.findall(text)))
        self.ends = [f"{program} ({how})" for program, how in ENDED.findall(text)]

    def hangs(self):
        return self.compiled and self.status is None


def unbroken(tests, number, limit):
    """The tests on the code as it is. Ends everything if that says nothing about broken code."""
    run = Run(f"unbroken-{number}", tests, limit, "--no-fail-fast")
    shown = " ".join(tests)
    if not run.compiled:
        sys.exit(f"breaks: without a break, this does not compile: {shown}: {run.error}")
    if run.hangs():
        sys.exit(f"breaks: without a break, this takes longer than {limit} s: {shown}")
    if not run.ran:
        sys.exit(f"breaks: this runs no test: {shown}")
    if run.status and (run.ends or not run.tests):
        sys.exit(f"breaks: without a break, a test program of these ends before its tests do: {shown}")
    for test in run.tests:
        tell(f"{test} fails without a break, so it counts for nothing")
    tell(f"{run.ran} tests run without a break in {run.seconds} s: {shown}")
    return run


def broken(one, before, limit):
    """What became of one break: its result, and by what it was caught."""
    path = TREE / one["file"]
    git(TREE, "checkout", "--", ".")
    path.write_text(path.read_text(encoding="utf-8").replace(one["find"], one["replace"]), encoding="utf-8")
    # What fails without a break must not keep the programs behind it from running.
    flags = ["--no-fail-fast"] if before.programs else []
    run = Run(one["id"], one["tests"], limit, *flags)
    by = [test for test in run.tests if test not in before.tests] + run.ends
    if not by:
        by = [program for program in run.programs if program not in before.programs]
    if not run.compiled:
        result, by = NOT_COMPILED, [run.error]
    elif run.hangs():
        result = HANGS
    else:
        result = CAUGHT if by else NOT_CAUGHT
    return {"result": result, "by": by[:NAMED], "all": len(by), "seconds": run.seconds}


def is_caught(found):
    return found is not None and found["result"] in (CAUGHT, HANGS)


def in_words(found):
    more = found["all"] - len(found["by"])
    return ", ".join(found["by"]) + (f" and {more} more" if more > 0 else "")


def table(breaks, results):
    yield "| break | file | result | by | seconds |"
    yield "|---|---|---|---|---|"
    for one in breaks:
        found, hard = results[one["id"]], " (hard)" if one.get("hard") else ""
        by = in_words(found).replace("|", "\\|")
        yield f"| {one['id']}{hard} | {one['file']} | {found['result']} | {by} | {found['seconds']} |"


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", metavar="TEXT", help="breaks whose id has this text")
    options.add_argument("--list", action="store_true", help="only look for every text, and name the breaks")
    options.add_argument("--timeout", type=int, default=1200, metavar="SECONDS", help="when tests hang (1200)")
    options.add_argument("--out", type=Path, default=TARGET / "breaks.json", metavar="FILE", help="target/breaks.json")
    options.add_argument("--go-on", action="store_true", help="keep what --out FILE has")
    options.add_argument("--against", type=Path, metavar="FILE", help="what an earlier run has written")
    options = options.parse_args()
    if options.timeout <= 0:
        sys.exit("breaks: --timeout takes a number of seconds above 0")
    # Read before anything is written: it may be the same file.
    earlier = json.loads(options.against.read_text(encoding="utf-8")) if options.against else {}
    breaks = json.loads(LIST.read_text(encoding="utf-8"))
    breaks = [one for one in breaks if options.only in str(one.get("id", ""))]
    if not breaks:
        sys.exit(f"breaks: no break has an id with {options.only!r}")
    if not options.list:
        prepare()
    wrong = all_wrong(breaks, ROOT if options.list else TREE)
    if wrong:
        sys.exit("\n".join(f"breaks: {what}" for what in wrong))
    if options.list:
        for one in breaks:
            print(f"{one['id']}{' (hard)' if one.get('hard') else ''}: {one['file']}: {one['what']}")
        print(f"{len(breaks)} breaks, {sum(one.get('hard', False) for one in breaks)} of them hard")
        return

    LOGS.mkdir(exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # What is told to end ends its tests first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.go_on and options.out.exists() else {}
    before, results = {}, {one["id"]: known[one["id"]] for one in breaks if one["id"] in known}
    left = [one for one in breaks if one["id"] not in results]
    try:
        for one in left:
            tests = tuple(one["tests"])
            if tests not in before:
                before[tests] = unbroken(one["tests"], len(before), options.timeout)
        for one in left:
            found = broken(one, before[tuple(one["tests"])], options.timeout)
            results[one["id"]] = found
            tell(f"{one['id']}: {found['result']}{': ' if found['by'] else ''}{in_words(found)}")
            # What was found so far stays, whatever ends this.
            options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    finally:
        git(TREE, "checkout", "--", ".")

    print(*table(breaks, results), sep="\n")
    of = {kind: [name for name, found in results.items() if found["result"] == kind]
          for kind in (CAUGHT, HANGS, NOT_CAUGHT, NOT_COMPILED)}
    print(f"\n{len(of[CAUGHT]) + len(of[HANGS])} of {len(results)} breaks are caught, {len(of[HANGS])} of them by a hang")
    for kind in (NOT_CAUGHT, NOT_COMPILED):
        if of[kind]:
            print(f"{kind}: {', '.join(of[kind])}")
    lost = [name for name, found in results.items() if is_caught(earlier.get(name)) and not is_caught(found)]
    if lost:
        print(f"caught in {options.against}, and not now: {', '.join(lost)}")
    sys.exit(1 if lost or of[NOT_COMPILED] else 0)


if __name__ == "__main__":
    main()
