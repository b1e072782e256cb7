"""The peers of the GPU check, each in its best form, beside what outcore does in the same part: PyTorch as one CUDA
graph, PyTorch streaming from locked memory, accelerate, llama.cpp. Called by extra.py."""

import json
import statistics
import sys
import time
from pathlib import Path

from extra import (
    LARGE, PROMPTS, SMALL, Clock, Generate, binary, budgets, fail, made, not_possible, number, prompt_rate, record, run,
    verdict,
)

# The tensors of `oversized`, and the rows of its products.
ROWS, COLS, ROWS_OF_X = 4096, 8192, 16
TENSOR = ROWS * COLS * 2
# Buffers through which PyTorch streams, of its budget; the rest of the budget keeps tensors for good.
BUFFERS = 3
TOKENS = 128
DEVICE = "cuda"


def median(values):
    return statistics.median(values)


def pytorch():
    try:
        import torch
    except ImportError as missing:
        not_possible(f"PyTorch is not installed: {missing}")
    if not torch.cuda.is_available():
        not_possible("PyTorch sees no GPU")
    return torch


def timed(torch, work, rounds):
    """Seconds on the GPU of each of several rounds, behind two that do not count."""
    seconds = []
    for at in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if at >= 2:
            seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds


# ---- decoding ----


def option(model, name, default):
    options = model[1]
    return options[options.index(name) + 1] if name in options else default


class Dense:
    """A Llama-family model of a shape of make_model, in bf16: static keys and values, projections of one input in one
    product, and a token as one graph, in which the next token is chosen and the position moves on."""

    def __init__(self, torch, model, capacity):
        self.torch, functional = torch, torch.nn.functional
        self.linear, self.norm = functional.linear, functional.rms_norm
        self.attend = functional.scaled_dot_product_attention
        self.layers, self.dim = option(model, "--layers", 22), option(model, "--dim", 2048)
        self.heads, self.groups = option(model, "--heads", 32), option(model, "--kv-heads", 4)
        ffn, vocab = option(model, "--ffn", 5632), option(model, "--vocab", 32000)
        self.size, self.capacity = self.dim // self.heads, capacity

        def matrix(rows, columns):
            return torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) / columns**0.5

        def layer():
            kv = self.groups * self.size
            return {
                "qkv": matrix(self.dim + 2 * kv, self.dim), "out": matrix(self.dim, self.dim),
                "up": matrix(2 * ffn, self.dim), "down": matrix(self.dim, ffn),
                "keys": torch.zeros(1, self.groups, capacity, self.size, device=DEVICE, dtype=torch.bfloat16),
                "values": torch.zeros(1, self.groups, capacity, self.size, device=DEVICE, dtype=torch.bfloat16),
            }

        self.weights = [layer() for _ in range(self.layers)]
        self.embedding = matrix(vocab, self.dim)
        self.head = self.embedding if "--tied" in model[1] else matrix(vocab, self.dim)
        self.scale = torch.ones(self.dim, device=DEVICE, dtype=torch.bfloat16)
        self.places = torch.arange(capacity, device=DEVICE)
        turns = 10000.0 ** (-torch.arange(0, self.size, 2, device=DEVICE) / self.size)
        angles = torch.outer(self.places.float(), turns)
        self.cos, self.sin = (f(angles).to(torch.bfloat16) for f in (torch.cos, torch.sin))
        self.token = torch.zeros(1, device=DEVICE, dtype=torch.long)
        self.position = torch.zeros(1, device=DEVICE, dtype=torch.long)

    def rotate(self, x, positions):
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[positions], self.sin[positions]
        return self.torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    def forward(self, ids, positions, mask):
        """The likeliest token behind the last of `ids`; a causal prompt from the start if there is no mask."""
        count = ids.shape[0]
        x = self.embedding[ids]
        kv = self.groups * self.size
        for layer in self.weights:
            y = self.linear(self.norm(x, (self.dim,), self.scale), layer["qkv"])
            q, k, v = y.split((self.dim, kv, kv), -1)
            q = self.rotate(q.view(count, self.heads, self.size).transpose(0, 1), positions)[None]
            k = self.rotate(k.view(count, self.groups, self.size).transpose(0, 1), positions)[None]
            v = v.view(count, self.groups, self.size).transpose(0, 1)[None]
            layer["keys"].index_copy_(2, positions, k)
            layer["values"].index_copy_(2, positions, v)
            if mask is None:
                out = self.attend(q, k, v, is_causal=True, enable_gqa=True)
            else:
                out = self.attend(q, layer["keys"], layer["values"], attn_mask=mask, enable_gqa=True)
            x = x + self.linear(out[0].transpose(0, 1).reshape(count, self.dim), layer["out"])
            gate, up = self.linear(self.norm(x, (self.dim,), self.scale), layer["up"]).chunk(2, -1)
            x = x + self.linear(self.torch.nn.functional.silu(gate) * up, layer["down"])
        logits = self.linear(self.norm(x[-1:], (self.dim,), self.scale), self.head)
        return logits.argmax(-1)

    def step(self):
        mask = (self.places <= self.position)[None, None, None]
        self.token.copy_(self.forward(self.token, self.position, mask))
        self.position.add_(1)

    def graph(self, work):
        """Work as one graph, tried a few times before."""
        stream = self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            for _ in range(3):
                work()
        self.torch.cuda.current_stream().wait_stream(stream)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            work()
        return graph

    def decode(self, rounds):
        """Tokens a second of graphs of a token, 128 at a time."""
        graph, rates = self.graph(self.step), []
        for at in range(rounds + 2):
            self.position.fill_(8)
            self.torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(TOKENS):
                graph.replay()
            self.torch.cuda.synchronize()
            if at >= 2:
                rates.append(TOKENS / (time.perf_counter() - begin))
        return rates

    def prompt(self, count, rounds):
        """Tokens a second of a prompt as one graph."""
        ids = self.torch.arange(count, device=DEVICE) % 999
        graph = self.graph(lambda: self.forward(ids, self.places[:count], None))
        return [count / seconds for seconds in timed(self.torch, graph.replay, rounds)]


def torch_decode(arguments):
    torch, program = pytorch(), Generate(arguments)
    record("chosen", name="peer", value=f"PyTorch {torch.__version__}, bf16, {torch.cuda.get_device_name()}")
    goals = dict(zip(PROMPTS, (0.55, 0.8)))
    with torch.no_grad():
        for model in (LARGE, SMALL):
            name = model[0]
            if not program.left(name):
                continue
            path = made(arguments, model)
            (device, host), _ = budgets(path)
            ours, theirs = [], []
            peer = Dense(torch, model, 256)
            # One and the other, twice; the other way round the second time.
            for turn in range(2):
                for who in ("ours", "theirs") if turn == 0 else ("theirs", "ours"):
                    if who == "theirs":
                        theirs += peer.decode(3)
                    else:
                        ours += [one["decode_tok_s"] for one in program.repeated(name, 2, 1, path, TOKENS, 8, device, host)[1]]
            del peer
            number(f"{name}: tokens a second", "tok/s", ours)
            number(f"{name}: tokens a second, PyTorch in bf16 as one graph", "tok/s", theirs, f"{name}: tokens a second")
            number(f"{name}: ours / PyTorch's", "ratio", [median(ours) / median(theirs)])
            if model is not LARGE:
                continue
            for prompt, goal in goals.items():
                what = f"{name}, a prompt of {prompt} tokens"
                if not program.left(what):
                    continue
                with Clock(arguments) as clock:
                    theirs = Dense(torch, model, prompt).prompt(prompt, 5)
                    ours = prompt_rate(program, what, path, prompt, 3, 2)
                number(f"{what}: tokens a second, PyTorch in bf16 as one graph", "tok/s", theirs)
                if ours is None:
                    record("note", text=f"{what}: no ratio, because this generate has no --repeat")
                    continue
                number(f"{what}: tokens a second", "tok/s", ours)
                verdict(f"{what}", median(ours) / median(theirs), "ratio", {"at_least": goal},
                        "tokens a second / PyTorch's in bf16; medians", clock.moved())


# ---- streaming ----


def ours(path):
    """Bytes of the model, the device budget and seconds of a pass of the oversized part, where it ran."""
    numbers = json.loads(Path(path).read_text())["parts"].get("oversized", {}).get("numbers", {})
    wanted = [numbers.get(name, {}).get("median") for name in ("bytes of the model", "device budget", "pass")]
    return wanted if wanted[0] and wanted[2] else [None] * 3


def tensors_of(wanted):
    """How many tensors a pass has, if the host has memory for them."""
    if wanted is None:
        record("note", text="the oversized part did not run: 8 GB are taken, and there is no ratio")
    count = int((wanted or 8e9) // TENSOR)
    available = next(int(line.split()[1]) << 10 for line in open("/proc/meminfo") if line.startswith("MemAvailable"))
    if count * TENSOR > 0.8 * available:
        not_possible(f"a model of {count} tensors does not fit {available / 2**30:.0f} GiB of free memory")
    return count


def report_pass(name, seconds, count, our_pass):
    number("pass", "s", seconds)
    number("weights used", "GB/s", [count * TENSOR / s / 1e9 for s in seconds])
    if our_pass:
        number(f"{name}'s pass / ours, of the same weights", "ratio", [s / our_pass for s in seconds])


def torch_stream(arguments):
    """The pass of oversized in PyTorch, as well as one can write it: what the budget keeps stays on the GPU, the rest
    comes from locked memory on a stream of its own, ahead of its use."""
    torch = pytorch()
    wanted, budget, our_pass = ours(arguments.results)
    count = tensors_of(wanted)
    slots = max(int((budget or count * TENSOR / 6) // TENSOR), BUFFERS + 1)
    host = torch.empty(count, ROWS, COLS, dtype=torch.bfloat16)
    host.copy_(torch.randn(ROWS, COLS, dtype=torch.float32))
    # Not by pin_memory, which rounds up to a power of two.
    status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel() * 2, 0)
    if int(status):
        fail(f"the memory cannot be locked: {status}")
    kept = slots - BUFFERS
    stays = [host[at].to(DEVICE) for at in range(kept)]
    buffers = [torch.empty(ROWS, COLS, dtype=torch.bfloat16, device=DEVICE) for _ in range(BUFFERS)]
    copies, linear = torch.cuda.Stream(), torch.nn.functional.linear
    filled, used = ([torch.cuda.Event() for _ in range(BUFFERS)] for _ in range(2))
    x = torch.randn(ROWS_OF_X, COLS, device=DEVICE, dtype=torch.float32).to(torch.bfloat16)

    def fetch(at):
        slot = at % BUFFERS
        with torch.cuda.stream(copies):
            copies.wait_event(used[slot])
            buffers[slot].copy_(host[kept + at], non_blocking=True)
            filled[slot].record(copies)

    def one_pass():
        main, streamed = torch.cuda.current_stream(), count - kept
        for at in range(min(BUFFERS, streamed)):
            fetch(at)
        for weight in stays:
            linear(x, weight)
        for at in range(streamed):
            slot = at % BUFFERS
            main.wait_event(filled[slot])
            linear(x, buffers[slot])
            used[slot].record(main)
            if at + BUFFERS < streamed:
                fetch(at + BUFFERS)

    seconds = []
    with torch.no_grad():
        for at in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            one_pass()
            torch.cuda.synchronize()
            if at >= 2:
                seconds.append(time.perf_counter() - begin)
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    record("chosen", name="peer", value=f"PyTorch {torch.__version__}: {kept} tensors stay, {count - kept} come from locked memory through {BUFFERS} buffers")
    report_pass("PyTorch", seconds, count, our_pass)


def accelerate(arguments):
    torch = pytorch()
    try:
        import accelerate as peer
    except ImportError as missing:
        not_possible(f"accelerate is not installed: {missing}")
    wanted, _, our_pass = ours(arguments.results)
    count = tensors_of(wanted)

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            with torch.device("meta"):
                linear = [torch.nn.Linear(COLS, ROWS, bias=False, dtype=torch.bfloat16) for _ in range(count)]
            self.layers = torch.nn.ModuleList(linear)

        def forward(self, x):
            for layer in self.layers:
                y = layer(x)
            return y

    model = Layers()
    values = torch.randn(ROWS, COLS, dtype=torch.float32).to(torch.bfloat16)
    for layer in model.layers:
        layer.weight = torch.nn.Parameter(values.clone(), requires_grad=False)
    model = peer.cpu_offload(model, execution_device=torch.device("cuda:0"))
    x = torch.randn(ROWS_OF_X, COLS, device="cuda:0", dtype=torch.float32).to(torch.bfloat16)
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
    report_pass("accelerate", seconds, count, our_pass)


# ---- llama.cpp ----


def bench(program, path, layers, repeats, **environment):
    """What llama-bench measured: tokens a second of a prompt of 512 and of 128 tokens behind it, a list each."""
    command = [program, "-m", path, "-p", PROMPTS[0], "-n", TOKENS, "-r", repeats, "-ngl", layers, "-o", "json"]
    status, out, errors = run(command, **environment)
    # Its libraries may print lines of their own before.
    begin = out.find("[")
    if status or begin < 0:
        print(errors[-4000:], file=sys.stderr)
        fail(f"llama-bench: status {status}")
    rows = json.loads(out[begin:])
    of = {bool(row["n_prompt"]): row["samples_ts"] for row in rows}
    return of.get(True, []), of.get(False, [])


def llama(arguments):
    peer, program, tiny = binary(arguments, "llama-bench"), Generate(arguments), arguments.scale == "tiny"
    for model in (LARGE, SMALL):
        name = model[0]
        if not program.left(name):
            continue
        path = made(arguments, model)
        resident, quarter = budgets(path)
        # Layers that fit a quarter of the memory; llama.cpp computes the others with the processor.
        few = max(option(model, "--layers", 22) // 4, 1)
        for where, (device, host), layers in (("all resident", resident, 99), ("a quarter on the GPU", quarter, few)):
            what = f"{name}, {where}"
            if not program.left(what):
                continue
            ours, theirs, prompts = [], [], []
            with Clock(arguments) as clock:
                for _ in range(1 if tiny else 2):
                    ours += [one["decode_tok_s"] for one in program.repeated(what, 2, 1, path, TOKENS, 8, device, host)[1]]
                    of_prompt, of_tokens = bench(peer, path, layers, 1 if tiny else 3)
                    prompts, theirs = prompts + of_prompt, theirs + of_tokens
            number(f"{what}: tokens a second", "tok/s", ours)
            number(f"{what}: tokens a second, llama.cpp", "tok/s", theirs, f"{what}: tokens a second")
            number(f"{what}: prompt of {PROMPTS[0]}, llama.cpp, tokens a second", "tok/s", prompts)
            if layers == 99 and model is LARGE:
                verdict(f"{what}: ours / llama.cpp's", median(ours) / median(theirs), "ratio", {"at_least": 1},
                        "tokens a second, one and the other by turns; medians", clock.moved())
            else:
                number(f"{what}: ours / llama.cpp's", "ratio", [median(ours) / median(theirs)])
            if layers == 99 and program.left(f"{what}, llama.cpp without graphs"):
                without = bench(peer, path, layers, 1 if tiny else 2, GGML_CUDA_DISABLE_GRAPHS="1")[1]
                number(f"{what}: tokens a second, llama.cpp without graphs", "tok/s", without)


PARTS = {"torch-decode": torch_decode, "torch-stream": torch_stream, "accelerate": accelerate, "llama": llama}
