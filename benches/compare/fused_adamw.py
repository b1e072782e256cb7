#!/usr/bin/env python3
"""PyTorch's fused AdamW over mapped files: fused_adamw.py FOLDER PARAMETERS STEPS

PARAMETERS is in units of 2^20, and is rounded up to whole tensors. Parameters, both moments and gradients, all
`float32` (28 bytes a parameter are read and written), are tensors of 64 MiB, each a mapped file of its own in FOLDER,
which is made. One tensor at a time is updated, so memory may be as small as the kernel's cache manages with. Prints the
seconds of each step as JSON. The page cache is not written back at the end of a step, as outcore's frames are not;
`os.sync` before each step keeps one step's writes out of the next one's time. Needs PyTorch.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

TENSOR = 1 << 24


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    folder, parameters, steps = Path(sys.argv[1]), int(sys.argv[2]) << 20, int(sys.argv[3])
    folder.mkdir(parents=True)
    count = -(-parameters // TENSOR)

    def mapped(name, at, value):
        tensor = torch.from_file(str(folder / f"{name}.{at}"), shared=True, size=TENSOR, dtype=torch.float32)
        tensor.fill_(value)
        return tensor

    begin = {"p": 1.0, "g": 0.25, "m": 0.0, "v": 0.0}
    state = [[mapped(name, at, value) for name, value in begin.items()] for at in range(count)]
    seconds = []
    for step in range(1, steps + 1):
        os.sync()
        begun = time.perf_counter()
        for parameter, gradient, first, second in state:
            torch._fused_adamw_(
                [parameter], [gradient], [first], [second], [], [torch.tensor(float(step))],
                lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            )
        seconds.append(time.perf_counter() - begun)
        print(f"step {step}: {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps({"parameters": count * TENSOR, "seconds": seconds, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
