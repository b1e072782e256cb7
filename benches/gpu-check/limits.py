"""Runs commands under limits. What does not end is named by a backtrace of its threads before it is ended. Standard
library only."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

# The status of a command that took too long, as that of `timeout`.
STOPPED = 124
# How long a debugger may take for one process, and how many processes are looked at.
DEBUGGER_SECONDS = 20
MOST_PROCESSES = 3
DEBUGGERS = ("cuda-gdb", "gdb")


def read(path):
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def parents():
    """The parent of every process, by number."""
    found = {}
    for entry in os.listdir("/proc"):
        stat = read(f"/proc/{entry}/stat") if entry.isdigit() else None
        if stat:
            # The name may hold blanks and parentheses.
            found[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    return found


def family(pid):
    """A process and what descends from it, parents first."""
    of = parents()
    found = [pid]
    for one in found:
        found += [child for child, parent in of.items() if parent == one]
    return found


def leaves(pids):
    """Those that started none of the others: what the others wait for."""
    of = parents()
    starters = {of.get(pid) for pid in pids}
    return [pid for pid in pids if pid not in starters]


def by_debugger(pid):
    """The backtrace of all threads by the first debugger that can make one, or why none could."""
    reasons = []
    for name in DEBUGGERS:
        tool = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
        if not tool:
            reasons.append(f"{name} is not installed")
            continue
        command = [tool, "-p", str(pid), "-batch", "-ex", "thread apply all bt"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False,
                                  timeout=DEBUGGER_SECONDS, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            reasons.append(f"{name} took longer than {DEBUGGER_SECONDS} s")
            continue
        if re.search(r"^#0 ", done.stdout, re.M):
            return name, done.stdout
        said = (done.stderr or done.stdout).strip().splitlines()
        reasons.append(f"{name}: {said[-1] if said else 'it said nothing'}")
    return None, "; ".join(reasons)


def by_kernel(pid):
    """What the kernel says of each thread: where it waits, and in which call."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        said = {what: read(task / what) for what in ("comm", "wchan", "syscall", "stack")}
        status = read(task / "status") or ""
        switches = re.findall(r"^(\w*voluntary_ctxt_switches):\s*(\d+)", status, re.M)
        lines.append(f"thread {task.name} ({said['comm']}): waits in {said['wchan'] or '?'}, call {said['syscall'] or '?'}, "
                     + ", ".join(f"{name} {count}" for name, count in switches))
        lines += [f"    {line}" for line in (said["stack"] or "").splitlines()]
    return "\n".join(lines)


def in_short(text):
    """A line for each thread of a debugger's backtrace: its name and its innermost functions. The first four threads."""
    threads = []
    for block in re.split(r"^(?=Thread \d+ )", text, flags=re.M):
        head = re.match(r'Thread \d+ (?:\([^"\n]*)?(?:"([^"]*)")?', block)
        frames = re.findall(r"^#\d+\s+(?:0x[0-9a-f]+ in )?([^\s(]+)", block, re.M)
        if head and frames:
            threads.append(f"{head.group(1) or 'a thread'}: {' < '.join(frames[:4])}")
    return threads[:4]


def where(pid):
    """Where a process and its children hang: the whole text, and a few words."""
    texts, words = [], []
    for one in leaves(family(pid))[:MOST_PROCESSES]:
        name = read(f"/proc/{one}/comm") or "gone"
        tool, text = by_debugger(one)
        if tool is None:
            why, text = text, by_kernel(one)
            tool = f"/proc ({why})"
            words += [line for line in text.splitlines() if line.startswith("thread")][:4]
        else:
            words += in_short(text)
        texts.append(f"== backtrace of {one} ({name}) by {tool}\n{text}")
    return "\n".join(texts), "; ".join(words)


def end(pid, process):
    """Ends a process and its children: asked first, killed after 5 s."""
    pids = family(pid)
    for signal_number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 20)):
        for one in pids:
            try:
                os.kill(one, signal_number)
            except ProcessLookupError:
                pass
        until = time.monotonic() + patience
        while time.monotonic() < until:
            process.poll()
            if not any(read(f"/proc/{one}/stat") and ") Z" not in read(f"/proc/{one}/stat") for one in pids):
                return
            time.sleep(0.05)


def run(command, seconds, out, errors, environment=None):
    """Runs a command with its streams to two open files. Its status, and if it took too long where it hung, in words;
    the backtrace goes to `errors`."""
    command = [str(part) for part in command]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment)
    try:
        return process.wait(timeout=seconds), None
    except subprocess.TimeoutExpired:
        text, words = where(process.pid)
        end(process.pid, process)
        errors.write(f"\n{text}\n".encode())
        errors.flush()
        return STOPPED, words
    except BaseException:
        end(process.pid, process)
        raise
