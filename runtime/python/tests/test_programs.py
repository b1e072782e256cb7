"""The program `outcore` of the package. Needs only the package: a wheel is tested by the same file."""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from urllib.parse import urlsplit

import outcore

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SCRIPT = Path(sys.executable).with_name("outcore")
# Where pip installed the package there is a script, and no search path is set for it.
PROGRAM = [SCRIPT] if SCRIPT.exists() and "PYTHONPATH" not in os.environ else [sys.executable, "-m", "outcore"]

# Reads a mapped file twice, says so, and once more for each line that it is sent.
PASSES = """
import hashlib, mmap, os, sys

path = sys.argv[1]
expected = hashlib.sha256(open(path, "rb").read()).hexdigest()
file = open(path, "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
while True:
    for _ in range(2):
        found = hashlib.sha256()
        for at in range(0, len(one), 1 << 20):
            found.update(one[at : at + (1 << 20)])
        assert found.hexdigest() == expected
    print("equal", os.getpid(), flush=True)
    if not sys.stdin.readline():
        break
"""


def setUpModule():
    global FOLDER, ENVIRONMENT
    FOLDER = tempfile.TemporaryDirectory()
    # A shell has what it starts in the background ignore Ctrl-C, and programs inherit that: these are tested as they
    # are started in the foreground.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What a program keeps for its user.
    ENVIRONMENT = {**os.environ, "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", os.path.join(FOLDER.name, "cache"))}


def tearDownModule():
    FOLDER.cleanup()


def done(*arguments):
    """Runs the program to its end."""
    command = [*PROGRAM, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=FOLDER.name, env=ENVIRONMENT
    )


def started(*arguments, **options):
    return subprocess.Popen([*PROGRAM, *arguments], text=True, cwd=FOLDER.name, env=ENVIRONMENT, **options)


class Program(unittest.TestCase):
    def said(self, *arguments):
        run = done(*arguments)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout

    def test_its_help_names_all_commands_and_serve(self):
        self.assertEqual(self.said("--version"), f"outcore {outcore.__version__}\n")
        commands = self.said("--help")
        for command in ("doctor", "run", "top", "export", "policies", "serve"):
            self.assertRegex(commands, rf"(?m)^  {command} ")
            self.assertIn(f"outcore {command}", self.said(command, "--help"))
        self.assertIn("--kv-memory", self.said("serve", "--help"))
        self.assertEqual(self.said("help", "serve"), self.said("serve", "--help"))

    def test_what_is_printed_is_whole(self):
        # A last line without an end is not left in a buffer.
        found = json.loads(self.said("doctor", "--dir", FOLDER.name, "--json"))
        self.assertGreater(found["memory"]["limit_bytes"], 0)
        self.assertIsNone(found["mapped_files"]["why_no_library"], "the library of `outcore run` is there")
        self.assertIn("hit ratio", self.said("policies", "--workload", "kv", "--policy", "lru"))

    def test_what_cannot_be_done_is_said(self):
        for arguments, status, begin, words in [
            ([], 2, "", ["Usage: outcore", "serve"]),
            (["inspekt"], 2, "error: ", ["inspect"]),
            (["inspect", "nowhere.gguf"], 1, "outcore: ", ["nowhere.gguf"]),
            (["serve"], 2, "error: ", ["--model", "Usage: outcore serve"]),
            (["serve", "--model", "m", "--port", "many"], 2, "error: ", ["many"]),
            (["serve", "--model", "nowhere.gguf", "--port", "0"], 1, "serve: ", ["nowhere.gguf"]),
            (["run", "--budget", "1", "--", "true"], 2, "error: ", ["--budget"]),
            (["run", "--budget", "1MiB", "--", "true"], 1, "outcore: ", ["--budget"]),
            (["run", "--budget", "8MiB", "--", "no-such-program"], 127, "outcore: ", ["no-such-program"]),
        ]:
            with self.subTest(arguments):
                run = done(*arguments)
                self.assertEqual((run.returncode, run.stdout), (status, ""), run.stderr)
                self.assertTrue(run.stderr.startswith(begin), run.stderr)
                self.assertNotIn("Traceback", run.stderr)
                for word in words:
                    self.assertIn(word, run.stderr)

    def test_names_that_are_no_text_reach_the_program(self):
        name = os.fsdecode(b"no\xffname.gguf")
        run = subprocess.run([*PROGRAM, "inspect", name], capture_output=True, timeout=120, check=False, env=ENVIRONMENT)
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertIn(b"name.gguf", run.stderr)

    def test_signals_end_it_as_they_end_any_program(self):
        pipe = os.path.join(FOLDER.name, "pipe")
        os.mkfifo(pipe)
        with started("policies", "--trace", pipe, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            # It is in the command when it has opened the pipe, in which it then waits for a trace.
            with open(pipe, "wb"):
                process.send_signal(signal.SIGINT)
                printed = process.communicate(timeout=120)
        self.assertEqual((process.returncode, printed), (-signal.SIGINT, ("", "")))

    def test_a_reader_that_has_seen_enough_is_no_error(self):
        reads, writes = os.pipe()
        os.close(reads)
        with os.fdopen(writes, "wb") as output:
            with started("policies", "--workload", "kv", "--policy", "lru", stdout=output, stderr=subprocess.PIPE) as process:
                self.assertEqual(process.communicate(timeout=120)[1], "")
        self.assertEqual(process.returncode, 0)


class Run(unittest.TestCase):
    def mapped(self):
        if not (path := Path(FOLDER.name, "model.gguf")).exists():
            path.write_bytes(b"GGUF" + os.urandom((40 << 20) + 12345))
        return path

    def test_a_program_reads_the_same_bytes_and_top_shows_it(self):
        arguments = ["run", "--budget", "8MiB", "--", sys.executable, "-c", PASSES, self.mapped()]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with started(*arguments, **pipes) as process:
            # The program has the place, and so the number, of the one that started it.
            self.assertEqual(process.stdout.readline(), f"equal {process.pid}\n")
            shown = done("top", str(process.pid), "--json", "--interval", "0.1")
            rest, told = process.communicate("again\n", timeout=120)
        if "is started without the library" in told:
            self.skipTest(told)
        self.assertEqual((process.returncode, rest), (0, f"equal {process.pid}\n"), told)
        self.assertIn("1 file(s) mapped, model.gguf", told)
        self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertIn("model.gguf", shown.stdout)

    def test_the_program_handles_signals_as_if_it_were_started_alone(self):
        shell = "grep SigIgn /proc/self/status"
        # By default this process's own, of Python, are restored there.
        alone = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
        run = done("run", "--budget", "8MiB", "--", "sh", "-c", shell)
        self.assertEqual((run.returncode, run.stdout), (0, alone), run.stderr)


class Serve(unittest.TestCase):
    def test_it_answers_and_ends_by_ctrl_c(self):
        if not MODEL.exists():
            if "model" in os.environ.get("OUTCORE_REQUIRE", "").split(","):
                self.fail(f"{MODEL} is not there, though OUTCORE_REQUIRE names it")
            self.skipTest(f"{MODEL} is not there: scripts/fetch_model.sh")
        arguments = ["serve", "--model", MODEL, "--memory", "400MiB", "--kv-space", "64MiB", "--port", "0"]
        log = Path(FOLDER.name, "log")
        with log.open("w") as errors, started(*arguments, stdout=subprocess.PIPE, stderr=errors) as process:
            try:
                address = process.stdout.readline().strip()
                self.assertTrue(address, log.read_text())
                connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
                body = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                reply = connection.getresponse()
                answer = json.loads(reply.read())
                connection.close()
                self.assertEqual(reply.status, 200, answer)
                self.assertIn("Paris", answer["choices"][0]["text"])
            finally:
                process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(timeout=120), 0, log.read_text())


class Build(unittest.TestCase):
    def test_other_platforms_are_refused_by_name(self):
        for change, name in [
            ("platform.system = lambda: 'Darwin'", "macOS"),
            ("platform.system = lambda: 'Windows'", "Windows"),
            ("platform.machine = lambda: 'riscv64'", "riscv64"),
            ("def gone(name): raise ValueError\nos.confstr = gone", "musl"),
        ]:
            code = f"import os, platform, sys\nsys.path.insert(0, sys.argv[1])\n{change}\nimport backend"
            command = [sys.executable, "-B", "-c", code, ROOT / "runtime" / "python"]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual((run.returncode, run.stdout), (1, ""), run.stderr)
            self.assertEqual(run.stderr.count("\n"), 1, run.stderr)
            self.assertIn(name, run.stderr)


if __name__ == "__main__":
    unittest.main()
