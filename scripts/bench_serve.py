#!/usr/bin/env python3
"""`serve` beside llama.cpp's own server, under the same load of streaming clients.

    bench_serve.py [SCENARIO...] [--rounds N] [--models DIR] [--out STEM] [--serve COMMAND] [--llama COMMAND]
    bench_serve.py --load URL [--clients N] [--prompt-tokens N] [--max-tokens N] [--rounds N]

Without names all scenarios run; `--list` names them. Each client sends one request to /v1/completions at the same
moment as the others: a prompt of its own, as token ids out of a seed, answered greedily by exactly so many tokens, as a
stream. Rounds of the sides are interleaved, both get the same prompts, each round has new ones, and ratios are taken
round by round.

With a memory limit a server is started for each round in a memory cgroup of its own, with the page cache dropped, and
ended behind it: only one lives at a time. In core all sides are started once and stay; the ones that are not being
measured are stopped by SIGSTOP. Before it is measured a server answers two small requests, which are not counted.

Prints a table in Markdown, and its figures as one line of JSON behind it; with `--out` also into STEM.md and
STEM.json. Exit status 1: a request failed, or was answered by another number of tokens than it asked for.

COMMAND replaces a server's command line: {model}, {port}, {clients}, {context} (tokens of one request), {contexts} (of
all), {memory} (bytes, what the limit leaves for pages), {cores}, {options} (a scenario's own) are filled in.

Where a server, or memory cgroups, are not to be had, it says so on standard error, and is no failure.
"""

import argparse
import asyncio
import bisect
import gc
import hashlib
import http.client
import itertools
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

from bench import PEER, PROMPT, RELEASE, ROOT, SKIPPED, generate, hardware, probe, spread
from bench_mapped import MIXTURE, Model, make

SERVE = f"{RELEASE}/serve --model {{model}} --port {{port}} --memory {{memory}} {{options}}"
# As many slots as clients, each with room for its request. No answers are kept for later in memory beside the slots: it
# would count towards the limit, and no prompt comes twice.
LLAMA = f"{PEER.with_name('llama-server')} -m {{model}} --host 127.0.0.1 --port {{port}} -np {{clients}}"
LLAMA += " -c {contexts} -t {cores} -tb {cores} --cache-ram 0 {options}"
PAGE = 2 << 20
# What a limit leaves to the program itself, beside pages.
HEADROOM = 10 * 10**6
IN_CORE_BYTES = 4 << 30
# Ids that all models here have, and that are plain text in the real one.
IDS = range(300, 31000)
LONG = ["--context", "8192"]
START_SECONDS = 300
STREAM_SECONDS = 300


@dataclass
class Load:
    """What the clients ask for."""

    clients: int
    prompt: int
    tokens: int
    # Prompts are one phrase over and over.
    repetitive: bool = False
    # A client more, whose prompt has so many tokens and whose answer has one. Gaps are those of the others meanwhile;
    # `gap_p99_of_alone` is over the median of those when it has been read.
    beside: int = 0

    def context(self):
        return -(-(max(self.prompt + self.tokens, self.beside) + 1) // 256) * 256


@dataclass
class Side:
    name: str
    program: str
    load: Load
    options: str = ""


@dataclass
class Scenario:
    name: str
    model: str
    limit: int | None
    sides: list
    # Only the time from the server's start to the first token is taken.
    cold: bool = False
    what: str = field(default="")

    def where(self):
        return f"{self.limit} MB" if self.limit else "in core"


def both(load, options=""):
    return [Side("serve", "serve", load, options), Side("llama-server", "llama-server", load)]


def scenarios():
    crowd = Load(16, 64, 32)
    alone = Load(1, 64, 32)
    # Long enough to go on when the prompt has been read.
    company = Load(8, 64, 320, beside=4000)
    echo = Load(1, 256, 128, repetitive=True)

    def speculation(load):
        return [Side(f"serve, drafts {way}", "serve", load, flag) for way, flag in [("on", "--speculate"), ("off", "")]]

    return [
        Scenario("crowd-in-core", "q8", None, both(Load(16, 64, 64)), what="16 clients"),
        Scenario("crowd-1000", "q8", 1000, both(crowd), what="16 clients"),
        Scenario("crowd-700", "q8", 700, both(crowd), what="16 clients"),
        Scenario(
            "one-or-many",
            "q8",
            700,
            [Side("serve, 16 clients", "serve", crowd), Side("serve, 1 client", "serve", alone)],
            what="16 clients and 1",
        ),
        Scenario("decode", "q8", None, both(Load(1, 16, 128)), what="1 client, short prompt"),
        Scenario("prefill", "q8", None, both(Load(1, 1024, 1)), what="1 client, long prompt"),
        Scenario("streams-64", "smollm2", None, both(Load(64, 64, 128)), what="64 clients"),
        Scenario("speculate", "smollm2", None, speculation(echo), what="1 client, repetitive"),
        Scenario("speculate-700", "q8", 700, speculation(Load(1, 64, 64, repetitive=True)), what="1 client, repetitive"),
        Scenario("long-prompt", "q8-4k", None, both(company), what="8 clients, one reads 4000 tokens"),
        Scenario("long-prompt-mixture", "moe-4k", 2097, both(company)[:1], what="8 clients, one reads 4000 tokens"),
        Scenario("cold", "q8", 2000, both(Load(1, 5, 1)), cold=True, what="start to first token"),
    ]


def tell(text):
    print(f"bench_serve: {text}", file=sys.stderr, flush=True)


# ---- the load ----


def prompts(load, seed):
    """A list of ids for each client; others for another seed."""
    for client in range(load.clients):
        draw = random.Random(f"{seed} {client}")
        if load.repetitive:
            phrase = draw.sample(IDS, 12)
            yield list(itertools.islice(itertools.cycle(phrase), load.prompt))
        else:
            yield [draw.choice(IDS) for _ in range(load.prompt)]
    if load.beside:
        draw = random.Random(f"{seed} beside")
        yield [draw.choice(IDS) for _ in range(load.beside)]


class Stream(asyncio.Protocol):
    """One request. Keeps what comes, and when; it is looked at when all have ended, so as not to disturb the load."""

    def __init__(self, ended):
        self.ended, self.parts, self.sent = ended, [], None

    def connection_made(self, transport):
        self.transport = transport

    def send(self, request):
        self.sent = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data):
        self.parts.append((time.perf_counter(), data))
        # The last chunk of an HTTP answer.
        if data.endswith(b"0\r\n\r\n"):
            self.transport.close()

    def connection_lost(self, error):
        if not self.ended.done():
            self.ended.set_result(error)


def pieces(raw, start, chunked):
    """(bytes of the body, offset in `raw` behind them)."""
    if not chunked:
        yield raw[start:], len(raw)
        return
    while (line := raw.find(b"\r\n", start)) >= 0:
        size = int(raw[start:line].split(b";")[0] or b"0", 16)
        end = line + 2 + size
        if not size or end > len(raw):
            return
        yield raw[line + 2 : end], end
        start = end + 2


def events(stream):
    """The answer's status, and (arrival, data) of each of its events."""
    raw = b"".join(data for _, data in stream.parts)
    ends = list(itertools.accumulate(len(data) for _, data in stream.parts))
    head, _, _ = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return None, []
    found, waiting = [], b""
    for body, offset in pieces(raw, len(head) + 4, b"transfer-encoding: chunked" in head.lower()):
        waiting += body.replace(b"\r\n", b"\n")
        arrival = stream.parts[bisect.bisect_left(ends, offset)][0]
        *whole, waiting = waiting.split(b"\n\n")
        for event in whole:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data:
                found.append((arrival, data))
    return int(head.split()[1]), found


def answer(stream, error):
    """What one client got."""
    status, found = events(stream)
    got = {"sent": stream.sent, "times": [], "end": None, "tokens": None, "prompt": None, "text": "", "error": None}
    if error or status != 200:
        said = b"".join(data for _, data in stream.parts)[-200:].decode(errors="replace")
        got["error"] = f"{error or 'status'} {status}: {said}"
        return got
    ended = False
    for arrival, data in found:
        if data == b"[DONE]":
            ended = True
            continue
        event = json.loads(data)
        if "error" in event:
            got["error"] = str(event["error"])[:200]
        if usage := event.get("usage"):
            got["tokens"], got["prompt"] = usage["completion_tokens"], usage["prompt_tokens"]
        for choice in event.get("choices", []):
            text = choice.get("text") or ""
            got["text"] += text
            got["end"] = arrival
            # A token may have no text of its own. What ends the stream is no token, unless it is all there is.
            if text or not choice.get("finish_reason") or not got["times"]:
                got["times"].append(arrival)
    if got["tokens"] is None:
        got["tokens"] = len(got["times"])
    if not ended and not got["error"]:
        got["error"] = "the stream broke off"
    return got


async def streams(port, requests):
    loop = asyncio.get_running_loop()
    made = []
    for _ in requests:
        ended = loop.create_future()
        made.append((await loop.create_connection(lambda e=ended: Stream(e), "127.0.0.1", port))[1])
    start = time.perf_counter()
    for stream, request in zip(made, requests):
        stream.send(request)
    done, _ = await asyncio.wait([stream.ended for stream in made], timeout=STREAM_SECONDS)
    for stream in made:
        if stream.ended not in done:
            stream.transport.abort()
    return start, [(stream, stream.ended.result() if stream.ended in done else "no end") for stream in made]


def tokens_until(one, at):
    """How many tokens a client has at a time. Where a server holds tokens back, of which it knows no text yet, they
    count as if they came evenly."""
    times, tokens = one["times"], one["tokens"]
    if 0.9 * tokens <= len(times) <= 1.1 * tokens or one["end"] <= times[0]:
        return bisect.bisect_right(times, at) * tokens / len(times)
    return 1 + (tokens - 1) * min(1.0, max(0.0, (at - times[0]) / (one["end"] - times[0])))


def processors(pid=None):
    """Seconds that all processors were busy, of which a process had so many; and that the host gave to others."""
    hz = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = map(int, open("/proc/stat").readline().split()[1:9])
    took = 0
    if pid:
        took = sum(map(int, open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[11:13]))
    return [ticks / hz for ticks in (user + nice + system + irq + softirq, took, steal)]


def percentile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))] if values else None


def run_load(port, model, load, seed, pid=None):
    """One round: what all clients got together, and with the server's process what the processors did."""
    requests = []
    for nth, ids in enumerate(prompts(load, seed)):
        most = load.tokens if nth < load.clients else 1
        body = {"model": model, "prompt": ids, "max_tokens": most, "temperature": 0, "stream": True}
        body.update({"ignore_eos": True, "stream_options": {"include_usage": True}})
        body = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    gc.collect()
    gc.disable()
    before, used = processors(pid), time.process_time()
    start, made = asyncio.run(streams(port, requests))
    used = time.process_time() - used
    busy, took, stolen = (now - then for now, then in zip(processors(pid), before))
    took_s = time.perf_counter() - start
    gc.enable()
    got = [answer(stream, error) for stream, error in made]
    beside = got.pop() if load.beside else None
    good = [one for one in got if not one["error"] and one["times"]]
    errors = [one["error"] for one in [*got, *filter(None, [beside])] if one["error"]]
    result = {"errors": len(got) - len(good) + bool(beside and beside["error"]), "first_error": errors[0] if errors else None, "at": start}
    result["other_length"] = sum(one["tokens"] != load.tokens for one in good)
    result["texts"] = hashlib.sha256("\0".join(one["text"] for one in got).encode()).hexdigest()[:16]
    if not good:
        return result
    last = max(one["end"] for one in good)
    firsts = [one["times"][0] for one in good]
    result["wall_s"] = last - start
    # In processors: what the load itself took, and on a shared machine what is left for others to have taken.
    result["client_cpu"] = used / took_s
    if pid:
        result["server_cpu"], result["others_cpu"] = took / took_s, max(0.0, busy - took - used) / took_s
        result["host_cpu"] = stolen / took_s
    result["tok_s"] = sum(one["tokens"] for one in good) / (last - start)
    # Until the last client has its first token: the others' tokens in between are paid for in that time, too.
    result["prompt_tok_s"] = sum(one["prompt"] or load.prompt for one in good) / (max(firsts) - start)
    # While all clients get tokens: none waits for its first, and none has ended.
    begin, end = max(firsts), min(one["end"] for one in good)
    within = sum(tokens_until(one, end) - tokens_until(one, begin) for one in good)
    if end > begin and within >= 4 * len(good):
        result["decode_tok_s"] = within / (end - begin)
    waits = [one["times"][0] - one["sent"] for one in good]
    result["ttft_s"], result["ttft_p99_s"] = statistics.median(waits), percentile(waits, 0.99)
    gaps = [after - before for one in good for before, after in itertools.pairwise(one["times"])]
    if beside and beside["times"]:
        read = beside["times"][0]
        result["beside_s"] = read - beside["sent"]
        # The first token of each comes out of a prompt of its own.
        gaps = [after - before for one in good for before, after in itertools.pairwise(one["times"][1:]) if after <= read]
        alone = [after - before for one in good for before, after in itertools.pairwise(one["times"]) if before > read]
        result["gap_p99_of_median"] = percentile(gaps, 0.99) / statistics.median(gaps) if gaps else None
        result["gap_p99_of_alone"] = percentile(gaps, 0.99) / statistics.median(alone) if gaps and alone else None
    # Where a server sends several tokens at once, gaps are those between what it sends.
    result["tokens_an_event"] = sum(one["tokens"] for one in good) / sum(len(one["times"]) for one in good)
    if gaps:
        result["gap_s"], result["gap_p99_s"] = statistics.median(gaps), percentile(gaps, 0.99)
    return result


# ---- the servers ----


class Skipped(Exception):
    pass


class Failed(Exception):
    pass


def ask(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answered = connection.getresponse()
        return answered.status, answered.read()
    finally:
        connection.close()


class Server:
    def __init__(self, template, model, side, limit, drop=True):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        load = side.load
        values = {"model": model, "port": self.port, "clients": load.clients, "context": load.context()}
        values.update({"contexts": load.clients * load.context(), "cores": os.cpu_count(), "options": side.options})
        values["memory"] = limit * 10**6 - HEADROOM if limit else IN_CORE_BYTES
        command = shlex.split(template.format(**values))
        if limit:
            wrapper = [ROOT / "scripts/cgroup_run.sh", *(["--drop-caches"] if drop else []), f"{limit}MB"]
            command = [*map(str, wrapper), *command]
        self.wrapped, self.said, self.paused = bool(limit), tempfile.TemporaryFile("w+", errors="replace"), False
        self.started = time.perf_counter()
        # In a group of its own: a Ctrl-C is for this program, which ends what it started in its order.
        places = {"stdin": subprocess.DEVNULL, "stdout": self.said, "stderr": self.said}
        self.process = subprocess.Popen(command, preexec_fn=os.setpgrp, **places)
        try:
            self.wait()
            self.healthy = time.perf_counter()
            named = json.loads(ask(self.port, "/v1/models")[1])
            self.model = named["data"][0]["id"]
        except BaseException:
            self.end()
            raise

    def tail(self):
        self.said.seek(0)
        return self.said.read()[-800:].strip()

    def wait(self):
        while time.perf_counter() < self.started + START_SECONDS:
            if (code := self.process.poll()) is not None:
                if code == SKIPPED and self.wrapped:
                    raise Skipped(self.tail())
                raise Failed(f"ended with status {code}: {self.tail()}")
            try:
                if ask(self.port, "/health")[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.005)
        raise Failed(f"not healthy after {START_SECONDS} s: {self.tail()}")

    def pid(self):
        """The server itself, not what wraps it."""
        if not self.wrapped:
            return self.process.pid
        me = self.process.pid
        children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
        return int(children[0]) if children else None

    def signal(self, which):
        try:
            if self.process.poll() is None:
                os.kill(self.pid() or self.process.pid, which)
        except (ProcessLookupError, FileNotFoundError):
            pass

    def pause(self):
        self.signal(signal.SIGSTOP)
        self.paused = True

    def resume(self):
        self.signal(signal.SIGCONT)
        self.paused = False

    def end(self):
        """Ends it, and returns the peak of its cgroup."""
        self.resume()
        for which in [signal.SIGTERM, signal.SIGKILL]:
            self.signal(which)
            try:
                self.process.wait(20)
                break
            except subprocess.TimeoutExpired:
                tell(f"port {self.port} did not end at {which.name}")
        for line in reversed(self.tail().splitlines()):
            if line.startswith("cgroup_run: limit="):
                return int(line.split("peak=")[1].split()[0])
        return None


# ---- rounds ----


def warm(server, load):
    for number in range(2):
        got = run_load(server.port, server.model, Load(1, 8, 2), f"warm {number}")
        if got["errors"]:
            raise Failed(f"a small request failed: {got['first_error']}")


def take(got, result):
    """Puts what a round measured behind what earlier rounds did."""
    for key, value in result.items():
        if key != "at":
            got.setdefault(key, []).append(value)


def in_core(scenario, sides, templates, model, rounds, found):
    servers = []
    try:
        for side in sides:
            server = Server(templates[side.program], model, side, None)
            servers.append(server)
            warm(server, side.load)
            server.pause()
        for number in range(rounds):
            for side, server in zip(sides, servers):
                server.resume()
                result = run_load(server.port, server.model, side.load, f"{scenario.name} {number}", server.pid())
                server.pause()
                report(scenario, side, number, result)
                take(found[side.name], result)
    finally:
        for server in servers:
            server.end()


def limited(scenario, sides, templates, model, rounds, found):
    for number, side in itertools.product(range(rounds), sides):
        server = Server(templates[side.program], model, side, scenario.limit)
        try:
            warm(server, side.load)
            result = run_load(server.port, server.model, side.load, f"{scenario.name} {number}", server.pid())
        finally:
            peak = server.end()
        result["peak"] = peak
        report(scenario, side, number, result)
        take(found[side.name], result)


def cold(scenario, sides, templates, model, rounds, found):
    """From the start of the process, its cgroup's included, to the first token; beside one pass at the disk's rate."""
    bytes_of_pass = generate(model, 2, ["--prompt-tokens", PROMPT])["pass_bytes"]
    for number in range(rounds):
        for side in sides:
            ceiling = bytes_of_pass / probe(model, PAGE)[0]
            # The cache is dropped before the clock starts.
            subprocess.run([ROOT / "scripts/cgroup_run.sh", "--drop-caches", "16MB", "true"], stderr=subprocess.DEVNULL)
            server = Server(templates[side.program], model, side, scenario.limit, drop=False)
            try:
                got = run_load(server.port, server.model, side.load, f"{scenario.name} {number}")
            finally:
                peak = server.end()
            result = {key: got[key] for key in ["errors", "first_error", "other_length"]}
            if "ttft_s" in got:
                total = got["at"] + got["ttft_s"] - server.started
                result.update({"healthy_s": server.healthy - server.started, "first_token_s": total, "peak": peak})
                result.update({"ceiling_s": ceiling, "of_ceiling": ceiling / total})
            report(scenario, side, number, result)
            take(found[side.name], result)


def report(scenario, side, number, result):
    shown = {key: round(value, 3) for key, value in result.items() if isinstance(value, float) and key != "at"}
    tell(f"{scenario.name}, round {number + 1}, {side.name}: {result['errors']} errors, {json.dumps(shown)}")


RATIOS = ["tok_s", "decode_tok_s", "prompt_tok_s", "ttft_s", "ttft_p99_s", "gap_s", "gap_p99_s", "first_token_s"]


def summary(scenario, found, sides, wrong):
    """Medians and spreads of a scenario's sides, and the first side over the second."""
    result = {"model": scenario.model, "where": scenario.where(), "what": scenario.what, "cold": scenario.cold}
    result["sides"] = {}
    for side in sides:
        got = found[side.name]
        if not got:
            continue
        if bad := sum(got["errors"]) + sum(got["other_length"]):
            said = next((error for error in got["first_error"] if error), "another length")
            wrong.append(f"{scenario.name}, {side.name}: {bad} answers failed or had another length; {said}")
        one = {"load": vars(side.load), "errors": sum(got["errors"]), "other_length": sum(got["other_length"])}
        for key, values in got.items():
            numbers = [value for value in values if isinstance(value, (int, float))]
            if key not in ["errors", "other_length", "first_error", "texts"] and numbers:
                one[key] = spread(numbers)
        one["texts"] = got.get("texts")
        result["sides"][side.name] = one
    if len(sides) == 2:
        ours, theirs = (found[side.name] for side in sides)
        result["ratio"] = {}
        for key in RATIOS:
            pairs = [(a, b) for a, b in zip(ours.get(key, []), theirs.get(key, [])) if a and b]
            # A figure that a round lacks would put the other rounds side by side wrongly.
            if pairs and len(ours[key]) == len(theirs[key]):
                result["ratio"][key] = spread([a / b for a, b in pairs])
        if scenario.name.startswith("speculate") and ours.get("texts") != theirs.get("texts"):
            wrong.append(f"{scenario.name}: the texts with and without speculation are not the same")
    return result


# ---- the table ----


def show(one, scale=1.0, digits=1):
    if not one:
        return "-"
    median, least, most = (one[key] * scale for key in ["median", "min", "max"])
    return f"{median:.{digits}f} [{least:.{digits}f} - {most:.{digits}f}]"


def table(results):
    h = results["hardware"]
    loads = [scenario for scenario in results["scenarios"].values() if not scenario["cold"]]
    starts = [scenario for scenario in results["scenarios"].values() if scenario["cold"]]
    lines = [
        f"{h['cores']} x {h['cpu']}, {h['memory_gib']} GiB, Linux {h['kernel']}, {h['filesystem']}; load"
        f" {h['load_before']:.1f} before the run; commit {h['commit']}, {h['date']}. Medians with [least - most] of"
        f" {results['rounds']} rounds, interleaved; `times` is the first side over the second, round by round.",
    ]
    if loads:
        lines += [
            "",
            "| model, where, load | side | tok/s in all | tok/s while all decode | prompt tok/s | first token s | p99"
            " | between tokens ms | p99 | errors | peak MB |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
    for scenario in loads:
        first = f"{results['models'][scenario['model']]}, {scenario['where']}, {scenario['what']}"
        for name, side in scenario["sides"].items():
            load = side["load"]
            shown = [show(side.get(key)) for key in ["tok_s", "decode_tok_s", "prompt_tok_s"]]
            shown += [show(side.get(key), 1, 2) for key in ["ttft_s", "ttft_p99_s"]]
            shown += [show(side.get(key), 1e3) for key in ["gap_s", "gap_p99_s"]]
            peak = f"{side['peak']['max'] / 1e6:.0f}" if "peak" in side else ""
            asked = f"{load['clients']} x {load['prompt']} + {load['tokens']}"
            bad = side["errors"] + side["other_length"]
            lines.append(f"| {first} | {name}, {asked} | {' | '.join(shown)} | {bad} | {peak} |")
            first = ""
        if scenario.get("ratio"):
            ratios = [show(scenario["ratio"].get(key), 1, 2) for key in RATIOS[:7]]
            lines.append(f"| | times | {' | '.join(ratios)} | | |")
    if starts:
        lines += ["", "| cold start | side | healthy s | first token s | one pass at the disk's rate s | of that |"]
        lines.append("|---|---|---|---|---|---|")
    for scenario in starts:
        for name, side in scenario["sides"].items():
            shown = [show(side.get(key), 1, 2) for key in ["healthy_s", "first_token_s", "ceiling_s", "of_ceiling"]]
            lines.append(
                f"| {results['models'][scenario['model']]}, {scenario['where']} | {name} | {' | '.join(shown)} |"
            )
    if loads:
        sides = [side for scenario in loads for side in scenario["sides"].values()]
        most = {
            key: max((side[key]["max"] for side in sides if key in side), default=0.0)
            for key in ["client_cpu", "others_cpu", "host_cpu"]
        }
        lines += [
            "",
            "Clients x prompt + answer are in tokens. `in all` counts from the first request to the last token, prompts"
            " included; `while all decode` from the last client's first token to the first client's last. Prompt tokens"
            " are over the time to the last client's first token.",
            f"The clients took at most {most['client_cpu']:.2f} of a processor. In the worst round, programs that have no"
            f" part in this took {most['others_cpu']:.2f}, and the host {most['host_cpu']:.2f}.",
        ]
    if starts:
        lines += ["", "A start counts from the process in its cgroup, behind a dropped page cache, to the first token."]
    lines += [f"WRONG: {what}" for what in results["wrong"]]
    return "\n".join(lines)


# ---- what runs ----


def models(folder):
    return {
        "q8": Model("1.2 GB Q8_0, synthetic", folder / "q8.gguf", 0, made_by=[]),
        "q8-4k": Model("1.2 GB Q8_0, synthetic", folder / "q8-4k.gguf", 0, made_by=LONG),
        "moe-4k": Model("4 GB mixture, 4 of 64 experts", folder / "moe-4k.gguf", 0, made_by=[*MIXTURE, *LONG]),
        "smollm2": Model("SmolLM2-135M Q4_1", ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf", 0),
    }


def measure(scenario, templates, model, rounds, wrong):
    """The scenario's summary with the sides that are here; `None` if there is nothing to say."""
    sides = [side for side in scenario.sides if side.program in templates]
    if not sides:
        tell(f"SKIPPED {scenario.name}: none of its servers is here")
        return None
    found = {side.name: {} for side in sides}
    way = cold if scenario.cold else limited if scenario.limit else in_core
    try:
        way(scenario, sides, templates, model.file, rounds, found)
    except Skipped as why:
        tell(f"SKIPPED {scenario.name}: {why}")
        return None
    except Failed as why:
        wrong.append(f"{scenario.name}: a server {why}")
        tell(f"FAILED {scenario.name}: a server {why}")
    return summary(scenario, found, sides, wrong)


def load_alone(options):
    """The load on a server that is there already."""
    place = urllib.parse.urlsplit(options.load)
    model = json.loads(ask(place.port, "/v1/models")[1])["data"][0]["id"]
    load = Load(options.clients, options.prompt_tokens, options.max_tokens, options.repetitive)
    for number in range(options.rounds):
        result = run_load(place.port, model, load, f"{options.seed} {number}")
        del result["at"]
        print(json.dumps(result), flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("scenarios", nargs="*")
    options.add_argument("--list", action="store_true", help="name the scenarios")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--models", type=Path, default=RELEASE.parent / "bench-models", help="where models are made")
    options.add_argument("--out", type=Path, help="where the table (.md) and the figures (.json) go besides")
    options.add_argument("--serve", default=SERVE, metavar="COMMAND")
    options.add_argument("--llama", default=LLAMA, metavar="COMMAND")
    options.add_argument("--load", metavar="URL", help="only the load, on this server of this machine")
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--prompt-tokens", type=int, default=64)
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--repetitive", action="store_true")
    options.add_argument("--seed", default="load")
    options = options.parse_args()
    # So that what was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench_serve: ended by SIGTERM"))
    if options.rounds < 1:
        sys.exit("bench_serve: at least one round")
    if options.load:
        return load_alone(options)
    every = scenarios()
    if options.list:
        for one in every:
            sides = "; ".join(f"{s.name}, {s.load.clients} x {s.load.prompt} + {s.load.tokens}" for s in one.sides)
            print(f"{one.name}: {one.model}, {one.where()}: {sides}")
        return None
    if unknown := set(options.scenarios) - {one.name for one in every}:
        sys.exit(f"bench_serve: no scenario is named {', '.join(sorted(unknown))}; --list names them")
    templates = {"serve": options.serve, "llama-server": options.llama}
    for name, template in list(templates.items()):
        if not Path(shlex.split(template)[0]).exists():
            remedy = "`make peers` builds it" if name == "llama-server" else "scripts/bench.sh builds it"
            tell(f"WARNING: {name} is ABSENT, so nothing is said of it; {remedy}")
            del templates[name]
    if not templates:
        return None
    chosen = [one for one in every if not options.scenarios or one.name in options.scenarios]
    here = models(options.models)
    here = {name: model for name, model in here.items() if name in {one.model for one in chosen} and make(model)}
    wrong = []
    results = {"hardware": hardware(options.models), "rounds": options.rounds}
    results["commands"] = {name: template.replace(f"{ROOT}/", "") for name, template in templates.items()}
    results["models"] = {name: model.name for name, model in here.items()}
    results["scenarios"] = {}
    for scenario in chosen:
        if scenario.model in here:
            if one := measure(scenario, templates, here[scenario.model], options.rounds, wrong):
                results["scenarios"][scenario.name] = one
    results["wrong"] = wrong
    print(table(results), flush=True)
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(table(results) + "\n")
    print("\n" + json.dumps(results))
    for what in wrong:
        tell(f"WRONG: {what}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
