#!/usr/bin/env python3
"""The PTX of the GPU's kernels that is part of programs: a file kernels.ptx beside each kernels.cu.

    kernels_ptx.py              check that they were made from the kernels' sources as they are; needs no compiler
    kernels_ptx.py --compare    compile them, and check that the same texts come out
    kernels_ptx.py --write      compile them, and write the files

The compiler is that of fetch_nvcc.sh, or NVCC. Only its version is compared with: another one writes other text.
"""

import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "examples/llm/src/cuda/kernels.cu", ROOT / "runtime/train/cuda/kernels.cu"]
# Of those whose results have the bits of the host: no product is fused with a sum.
EXACT = {ROOT / "runtime/train/cuda/kernels.cu": ["-fmad=false"]}
# What they may have no instruction of: fused, flushed to zero, approximate.
INEXACT = re.compile(r"\bfma\.[\w.]*f(?:32|64)\b|\.ftz\b|\.approx\b")
VERSION = "13.0.88"
# The oldest architecture and the oldest driver that are supported: CUDA 12.0 knows PTX 8.0.
ARCHITECTURE = "compute_80"
ISA = "8.0"
# What checks that no newer instruction is in it.
MACHINES = ("sm_80", "sm_90")
# A program has the text in it, and every copy of the repository too.
LIMIT = 1_500_000


def fail(text):
    sys.exit(f"kernels_ptx: {text}")


def parts(source):
    """The files that kernels are made of, in order: those that the source includes, or itself."""
    names = re.findall(r'^#include "(.*)"$', source.read_text(encoding="utf-8"), re.M)
    return [source.parent / name for name in names] or [source]


def first_line(source):
    digest = hashlib.sha256()
    for path in parts(source):
        digest.update(path.read_bytes() + b"\0")
    return f"// {ARCHITECTURE}, PTX {ISA}, by nvcc {VERSION} from sources with sha256 {digest.hexdigest()}\n"


def shortened(text):
    """The same instructions in fewer characters."""
    lines = []
    for line in text.splitlines():
        line = " ".join(line.split("//")[0].split())
        if line:
            lines.append(line)
    text = "\n".join(lines) + "\n"
    text = re.sub(r"\$L__BB(\d+_\d+)", r"$\1", text)
    text = re.sub(r"(?<=[,;]) ", "", text)
    # Names of what is not visible outside hold a hash of the compiler's temporary files.
    text = re.sub(r"_ZZN\d+_INTERNAL_[0-9a-f]+_\d+_kernels_cu_[0-9a-f]{8}", "_ZZN", text)
    return text


def compiled(source):
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    nvcc = pathlib.Path(os.environ.get("NVCC", target / "nvcc/nvidia/cu13/bin/nvcc"))
    if not nvcc.exists():
        fail(f"{nvcc} is absent; scripts/fetch_nvcc.sh gets it")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    if f"V{VERSION}" not in version:
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "kernels.ptx"
        subprocess.run([nvcc, "-std=c++17", "-ptx", f"-arch={ARCHITECTURE}", *EXACT.get(source, []), "-o", out, source],
                       check=True)
        text, count = re.subn(r"^\.version \d+\.\d+$", f".version {ISA}", out.read_text(), flags=re.M)
        if count != 1:
            fail("the compiler writes no line with a version")
        text = first_line(source) + shortened(text)
        out.write_text(text)
        for machine in MACHINES:
            done = subprocess.run(
                [nvcc.parent / "ptxas", f"-arch={machine}", "-O0", "-o", os.devnull, out], capture_output=True, text=True
            )
            if done.returncode != 0:
                fail(f"ptxas refuses the PTX for {machine}: {done.stderr}")
    if len(text) > LIMIT:
        fail(f"the PTX has {len(text)} characters; at most {LIMIT} are meant to be in the program: have fewer variants")
    return text


def main():
    what = sys.argv[1:]
    if what not in ([], ["--compare"], ["--write"]):
        sys.exit(__doc__)
    for source in SOURCES:
        ptx = source.with_suffix(".ptx")
        name = ptx.relative_to(ROOT)
        if what == ["--write"]:
            text = compiled(source)
            if text is None:
                fail(f"the compiler is not of version {VERSION}")
            ptx.write_text(text, encoding="utf-8")
            print(f"{name}: {len(text)} characters")
            continue
        have = ptx.read_text(encoding="utf-8") if ptx.exists() else ""
        if not have.startswith(first_line(source)):
            fail(f"{name} was made from other sources: scripts/kernels_ptx.py --write makes it anew")
        found = INEXACT.search(have) if source in EXACT else None
        if found:
            fail(f"{name} has {found[0]}, which does not round as the host does")
        if what == ["--compare"]:
            text = compiled(source)
            if text is None:
                print(f"kernels_ptx: the compiler is not of version {VERSION}: its PTX was not compared")
            elif text != have:
                fail(f"the compiler makes other PTX than {name}: --write makes it anew")
    print("kernels_ptx: ok")


main()
