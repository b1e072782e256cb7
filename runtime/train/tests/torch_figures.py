#!/usr/bin/env python3
"""Makes data/torch.json: the parameters that PyTorch's optimizers leave after 1, 10 and 100 steps.

    torch_figures.py

Needs PyTorch (`pip install torch numpy` in a venv) and is not part of the tests, which only read the file in the tree.
Run it again only to change the cases. The file has no clock or random number in it.

The optimizers run on the CPU in float32 with foreach=False and fused=False, which is PyTorch's plain code for one
tensor at a time. All tensors of a case belong to one optimizer.

Parameters and gradients come from an integer generator whose values are exact in float32:

    x = seed                                              (64-bit unsigned)
    before each value: x = x * 6364136223846793005 + 1442695040888963407 (mod 2^64)
    value = (x >> 40) / 2^23 - 1                          (x >> 40 has 24 bits; the value is in [-1, 1))

    seed = case * 1000003 + tensor * 10007 + step         (case and tensor count from 0)

Step 0 gives a tensor's first parameters. Steps 1 to 100 give its gradients, each value times 2^-3.

A tensor of more than 64 elements is written with a stride of 16: elements 0, 16, 32 and so on. "largest" is the
largest absolute value over all its elements at that step.
"""

import json
import math
from pathlib import Path

import numpy
import torch

STEPS = 100
KEPT = (1, 10, 100)
SIZES = (1, 7, 31, 1023)
GENERATOR = (
    "x = seed; before each value x = x * 6364136223846793005 + 1442695040888963407 (mod 2^64); "
    "value = (x >> 40) / 2^23 - 1; seed = case * 1000003 + tensor * 10007 + step, case and tensor from 0; "
    "step 0: parameters, steps 1 to 100: gradients, each value times 2^-3"
)


def adamw(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    return {"betas": list(betas), "eps": eps, "weight_decay": weight_decay}


def sgd(momentum=0.0, weight_decay=0.0):
    return {"momentum": momentum, "dampening": 0.0, "nesterov": False, "weight_decay": weight_decay}


def warm_up_and_cosine(largest, warm_up):
    """Rises in a line to `largest` at step `warm_up`, then falls as a half cosine to 0 at the last step."""
    rise = [largest * step / warm_up for step in range(1, warm_up + 1)]
    rest = STEPS - warm_up
    return rise + [largest * 0.5 * (1.0 + math.cos(math.pi * step / rest)) for step in range(1, rest + 1)]


# Name, rule, settings, and the learning rate of each step.
CASES = [
    ("adamw", "adamw", adamw(), [1e-3] * STEPS),
    ("adamw, other settings", "adamw", adamw((0.8, 0.95), 1e-6, 0.3), [3e-2] * STEPS),
    ("adamw, no decay, scheduled", "adamw", adamw(weight_decay=0.0), warm_up_and_cosine(1e-2, 10)),
    ("sgd, momentum", "sgd", sgd(0.9), [1e-2] * STEPS),
    ("sgd, momentum and decay", "sgd", sgd(0.9, 0.05), [1e-2] * STEPS),
    ("sgd", "sgd", sgd(), [1e-2] * STEPS),
]


def made(case, tensor, step, elements):
    x = case * 1_000_003 + tensor * 10_007 + step
    values = []
    for _ in range(elements):
        x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
        values.append((x >> 40) / 2**23 - 1.0)
    scale = 1.0 if step == 0 else 2.0**-3
    return torch.from_numpy(numpy.array(values, dtype=numpy.float32) * numpy.float32(scale))


def stride(elements):
    return 16 if elements > 64 else 1


def run(case, rule, settings, rates):
    """The tensors of one case, each with what is kept of it."""
    parameters = [torch.nn.Parameter(made(case, tensor, 0, size)) for tensor, size in enumerate(SIZES)]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[rule]
    optimizer = kind(parameters, lr=rates[0], foreach=False, fused=False, **settings)
    kept = [{"elements": size, "stride": stride(size), "after": {}} for size in SIZES]
    for step, rate in enumerate(rates, 1):
        optimizer.param_groups[0]["lr"] = rate
        for tensor, parameter in enumerate(parameters):
            parameter.grad = made(case, tensor, step, parameter.numel())
        optimizer.step()
        if step in KEPT:
            for parameter, tensor in zip(parameters, kept):
                values = parameter.detach()
                tensor["after"][str(step)] = {
                    "largest": values.abs().max().item(),
                    "values": values[:: tensor["stride"]].tolist(),
                }
    return kept


def main():
    torch.set_num_threads(1)
    cases = []
    for case, (name, rule, settings, rates) in enumerate(CASES):
        head = {"name": name, "rule": rule, "settings": settings, "lr": rates}
        tensors = ",\n".join(json.dumps(tensor) for tensor in run(case, rule, settings, rates))
        cases.append(f'{json.dumps(head)[:-1]}, "tensors": [\n{tensors}\n]}}')
    # The part of a version after "+" names the build, for CPU or CUDA.
    top = {"generator": GENERATOR, "torch": torch.__version__.split("+")[0]}
    text = f'{json.dumps(top)[:-1]}, "cases": [\n' + ",\n".join(cases) + "\n]}\n"
    json.loads(text)
    path = Path(__file__).resolve().parent / "data/torch.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()
