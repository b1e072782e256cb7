#!/usr/bin/env python3
"""Runs a command, and ends it if it hangs: if it has printed nothing for too long.

    watch.py SECONDS COMMAND [ARGUMENT...]
    watch.py --self-test

What the command prints goes through. How long it takes does not matter, so a busy machine is no reason to fail; a
silence of SECONDS is. A process that was stopped, or got no processor, hears no silence: what counts is how often the
watcher woke up in vain. The whole process group is ended. The exit status is the command's, 124 if it was ended.
"""

import os
import select
import signal
import subprocess
import sys

HUNG = 124
# How long the command has after SIGTERM.
GRACE_SECONDS = 10


class Silence:
    """Counts seconds without a word."""

    def __init__(self, seconds):
        self.left = self.seconds = seconds

    def heard(self):
        self.left = self.seconds

    def second(self):
        """Counts one second of silence. Returns whether that was one too many."""
        self.left -= 1
        return self.left <= 0


def end(process):
    """Ends the command's process group, in two steps."""
    for how, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        if how == signal.SIGTERM:
            # Other processes that the command has started may still be there.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        break


def status_of(process):
    code = process.wait()
    return code if code >= 0 else 128 - code


def watch(seconds, command, out=None, err=None):
    """Runs the command; its exit status. `out` and `err` are file descriptors."""
    targets = {}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    targets[process.stdout.fileno()] = 1 if out is None else out
    targets[process.stderr.fileno()] = 2 if err is None else err
    silence, tail = Silence(seconds), b""
    try:
        while targets:
            ready, _, _ = select.select(list(targets), [], [], 1)
            if not ready:
                # What the command has left behind may hold its pipes. Nobody waits for that.
                if process.poll() is not None:
                    break
                if silence.second():
                    end(process)
                    last = tail.decode(errors="replace").strip().splitlines()
                    text = f"watch: no output for {seconds} s, so it was ended; the last line: {last[-1] if last else '(none)'}\n"
                    os.write(2 if err is None else err, text.encode())
                    return HUNG
            for source in ready:
                part = os.read(source, 1 << 16)
                if not part:
                    del targets[source]
                    continue
                silence.heard()
                tail = (tail + part)[-4096:]
                target = targets[source]
                while part:
                    part = part[os.write(target, part) :]
        # Its output has ended; the command may go on.
        while process.poll() is None:
            try:
                process.wait(1)
            except subprocess.TimeoutExpired:
                if silence.second():
                    end(process)
                    return HUNG
        return status_of(process)
    except KeyboardInterrupt:
        end(process)
        return 130
    finally:
        process.stdout.close()
        process.stderr.close()


def self_test():
    import tempfile
    from pathlib import Path

    # By the counter, not by the clock.
    silence = Silence(3)
    assert [silence.second() for _ in range(2)] == [False, False]
    silence.heard()
    assert [silence.second() for _ in range(3)] == [False, False, True]

    def run(seconds, script):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            status = watch(seconds, ["bash", "-c", script], out.fileno(), err.fileno())
            out.seek(0), err.seek(0)
            return status, out.read(), err.read()

    assert run(600, "echo one; echo two >&2; printf 'no newline'") == (0, b"one\nno newline", b"two\n")
    assert run(600, "exit 77")[0] == 77
    assert run(600, "kill -9 $$")[0] == 137
    large = run(600, "head -c 3000000 /dev/zero; head -c 1000000 /dev/zero >&2")
    assert large[0] == 0 and (len(large[1]), len(large[2])) == (3000000, 1000000)
    # A command that stays silent is ended, with what it has started. What it printed last is passed on.
    with tempfile.TemporaryDirectory() as folder:
        fifo = Path(folder) / "fifo"
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        # Both keep the fifo open for as long as they live, and the inner one does not hear SIGTERM.
        status, out, err = run(1, f"exec 5>{fifo}; echo hello; bash -c 'trap \"\" TERM; while :; do sleep 1; done' & sleep 1000")
        assert status == HUNG and out == b"hello\n" and b"hello" in err, (status, out, err)
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b"", "somebody still lives"
        os.close(reader)
    # A command that closes its output and goes on is watched too.
    assert run(1, "exec >&- 2>&-; sleep 1000")[0] == HUNG
    # What a command leaves behind does not keep it waiting.
    status, out, _ = run(600, "sleep 1000 & echo $!; exit 5")
    os.kill(int(out), signal.SIGKILL)
    assert status == 5
    print("watch: ok")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or int(sys.argv[1]) == 0:
        sys.exit(__doc__)
    return watch(int(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
