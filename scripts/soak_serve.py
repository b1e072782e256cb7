#!/usr/bin/env python3
"""Many streams for a long time, each answer compared with the one it had alone.

    soak_serve.py --model FILE [--seconds 600] [--streams 64] [--memory 300MB] [--active 8] [--seed N]

It starts the release build of `serve` and asks each question once, alone. Then `--streams` clients stream answers at
once, over and over, while only `--active` of them have room for their keys and values. Some clients go away in the
middle. It fails if an answer differs from the one alone, if there is any error, if the 99th percentile of the time
between tokens is more than three times the median, if the process takes more than `--memory`, or if anything is in use
at the end. Python's standard library only.
"""

import argparse
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORDS = "the river and a lighthouse keeper who counts seven ships before dawn while it rains over old stone".split()
QUESTIONS = 48
# The longest question with its answer, in tokens, is about this.
LONGEST = 320


def questions(seed):
    """Requests of different lengths; half of them draw tokens by a seed, and a third begin alike."""
    draw = random.Random(seed)
    shared = " ".join(draw.choices(WORDS, k=60))
    for nth in range(QUESTIONS):
        text = " ".join(draw.choices(WORDS, k=draw.randrange(4, 60)))
        body = {"prompt": shared + " " + text if nth % 3 == 0 else text, "max_tokens": draw.randrange(20, 130),
                "ignore_eos": True, "stream": True}
        body |= {"temperature": 0} if nth % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": draw.randrange(1 << 30)}
        yield body


def answer(port, body, leave_after=None):
    """The text of an answer, and when each token came. With `leave_after`, the client goes away after so many."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.read(500)}")
        text, times, finish = [], [], None
        for line in reply:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return "".join(text), times
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"an error in the stream: {event}")
            choice = event["choices"][0]
            if choice["finish_reason"]:
                finish = choice["finish_reason"]
                continue
            text.append(choice["text"])
            times.append(time.monotonic())
            if leave_after is not None and len(times) >= leave_after:
                return None, times
        raise RuntimeError(f"the stream ended without [DONE], finish_reason {finish}")
    finally:
        connection.close()


def metric(port, name):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)]
    return sum(float(value) for value in values)


def peak_bytes(pid):
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read()).group(1)) * 1024


def parse_bytes(text):
    number, unit = re.fullmatch(r"(\d+)(MB|MiB|GB|GiB)", text).groups()
    return int(number) * {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}[unit]


class Soak:
    def __init__(self, options, wanted, bodies, port):
        self.options, self.wanted, self.bodies, self.port = options, wanted, bodies, port
        self.lock = threading.Lock()
        self.until = time.monotonic() + options.seconds
        self.gaps, self.firsts, self.answers, self.left, self.tokens = [], [], 0, 0, 0
        self.wrong = []

    def client(self, number):
        draw = random.Random(self.options.seed * 1000 + number)
        while time.monotonic() < self.until and not self.wrong:
            nth = draw.randrange(QUESTIONS)
            leave = draw.randrange(1, 10) if draw.random() < 0.05 else None
            begin = time.monotonic()
            try:
                text, times = answer(self.port, self.bodies[nth], leave)
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                with self.lock:
                    self.wrong.append(f"question {nth}: {error!r}")
                return
            with self.lock:
                self.gaps += [after - before for before, after in zip(times, times[1:])]
                self.firsts.append(times[0] - begin)
                self.tokens += len(times)
                self.answers += text is not None
                self.left += text is None
                if text is not None and text != self.wanted[nth]:
                    self.wrong.append(f"question {nth}: {text!r} instead of {self.wanted[nth]!r}")

    def run(self):
        clients = [threading.Thread(target=self.client, args=[number]) for number in range(self.options.streams)]
        [client.start() for client in clients]
        [client.join() for client in clients]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--memory", default="300MB")
    parser.add_argument("--active", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("options", nargs="*", help="more options of serve, behind --")
    options = parser.parse_args()
    program = os.path.join(os.environ.get("CARGO_TARGET_DIR") or os.path.join(ROOT, "target"), "release", "serve")
    command = [program, "--model", options.model, "--port", "0", "--memory", options.memory, *options.options]
    bodies = list(questions(options.seed))

    def start(kv_memory):
        server = subprocess.Popen([*command, "--kv-memory", str(kv_memory)], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True)
        log = []
        reading = threading.Thread(target=lambda: log.extend(server.stderr), daemon=True)
        reading.start()
        address = server.stdout.readline().strip()
        if not address:
            reading.join()
            sys.exit(f"soak_serve: serve did not start: {''.join(log)}")
        return server, int(address.rsplit(":", 1)[1]), log

    server, port, log = start(64 << 20)
    wanted = [answer(port, body)[0] for body in bodies]
    server.send_signal(signal.SIGTERM)
    server.wait()
    # The log says how many tokens that is.
    tokens = int(re.search(r"active_tokens=(\d+)", "".join(log)).group(1))
    server, port, log = start(options.active * LONGEST * (64 << 20) // tokens)
    soak = Soak(options, wanted, bodies, port)
    began = time.monotonic()
    soak.run()
    took = time.monotonic() - began
    peak = peak_bytes(server.pid)
    deadline = time.monotonic() + 60
    while metric(port, 'outcore_kv_blocks{state="used"}') and time.monotonic() < deadline:
        time.sleep(0.1)
    used = metric(port, 'outcore_kv_blocks{state="used"}')
    preempted = metric(port, "outcore_preemptions_total")
    server.send_signal(signal.SIGTERM)
    status = server.wait()
    median = statistics.median(soak.gaps)
    last = statistics.quantiles(soak.gaps, n=100)[98]
    print(f"{options.streams} streams for {took:.0f} s, room for {options.active} answers of {LONGEST} tokens, "
          f"seed {options.seed}:")
    print(f"  {soak.answers} answers, {soak.tokens} tokens ({soak.tokens / took:.0f}/s), {soak.left} clients that left, "
          f"{preempted:.0f} preemptions")
    print(f"  between tokens: median {1e3 * median:.1f} ms, 99th percentile {1e3 * last:.1f} ms, "
          f"ratio {last / median:.2f}")
    print(f"  first token: median {statistics.median(soak.firsts):.2f} s, most {max(soak.firsts):.2f} s")
    print(f"  peak of memory {peak / 1e6:.0f} MB of {options.memory}")
    failed = soak.wrong[:3]
    if last > 3 * median:
        failed.append(f"the 99th percentile between tokens is {last / median:.2f} times the median, and 3 are allowed")
    if peak > parse_bytes(options.memory):
        failed.append(f"the process took {peak} bytes, more than {options.memory}")
    if used or status:
        failed.append(f"{used:.0f} blocks are in use at the end, status {status}: {''.join(log[-5:])}")
    for why in failed:
        print(f"soak_serve: {why}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
