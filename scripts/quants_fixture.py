#!/usr/bin/env python3
"""What ggml makes of blocks, and of numbers: the files that the tests of outcore-quants compare with.

    quants_fixture.py              check that the files have what this script makes
    quants_fixture.py --write      write them

It needs `pip install gguf==0.19.0 llama-cpp-python==0.3.36` (both MIT), which compiles ggml, and no network. ggml must
be compiled for x86-64 without FMA, as its build does unless told otherwise: other compilers fuse products with sums,
and get other last bits.

`gguf.txt` has the values of blocks of IQ4_NL, IQ4_XS and MXFP4 at the ends of what scales can be, by the package gguf,
which decodes as ggml does. `ggml.txt` has the blocks of all types that ggml's quantiser makes of rows of numbers,
ordinary and awkward ones, without an importance matrix. A line of them begins with a word (`type`, `block`, `values`,
`row`, or a type's name), and those of numbers go on from line to line. Numbers are the bits of f32.
"""

import ctypes
import math
import pathlib
import struct
import sys

import llama_cpp
import numpy
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "runtime/quants"
# Each nibble in the low half of a byte, and in the high half of another.
NIBBLES = bytes(low | ((low * 7 + 3) % 16) << 4 for low in range(16))


def halves(*numbers: float) -> list[bytes]:
    return [struct.pack("<e", number) for number in numbers]


def scales(six_bits: list[int]) -> bytes:
    """The bytes of IQ4_XS for eight scales: the high two bits of each in a number of 16, then the low four."""
    high = sum((scale >> 4) << 2 * j for j, scale in enumerate(six_bits))
    return struct.pack("<H", high) + bytes(six_bits[2 * i] & 15 | (six_bits[2 * i + 1] & 15) << 4 for i in range(4))


def blocks() -> list[tuple[Type, bytes]]:
    smallest, largest = 2.0**-24, 65504.0
    listed = [(Type.MXFP4, bytes([e]) + NIBBLES) for e in (0, 1, 2, 3, 126, 127, 128, 200, 253, 254, 255)]
    listed += [(Type.IQ4_NL, d + NIBBLES) for d in halves(0.0, -0.0, smallest, -smallest, 1.0, -0.3, largest, -largest)]
    qs = bytes(NIBBLES[(i * 5 + i // 16) % 16] ^ (i // 16) for i in range(128))
    for d, its in zip(
        halves(-smallest, 0.0123, largest),
        ([0, 63, 32, 31, 33, 1, 62, 16], [47, 48, 15, 17, 5, 58, 40, 21], [63, 0, 2, 32, 61, 3, 44, 10]),
    ):
        listed.append((Type.IQ4_XS, d + scales(its) + qs))
    return listed


def wrapped(word: str, text: str, width: int) -> list[str]:
    return [f"{word} {text[at : at + width].strip()}\n" for at in range(0, len(text), width)]


def values_of_blocks() -> str:
    lines = ["# By scripts/quants_fixture.py and gguf 0.19.0.\n"]
    for dtype, block in blocks():
        # Of a power of two that is no number for others, products are infinite.
        with numpy.errstate(over="ignore"):
            values = dequantize(numpy.frombuffer(block, dtype=numpy.uint8), dtype)
        lines.append(f"type {dtype.name}\n")
        lines += wrapped("block", block.hex(), 96)
        lines += wrapped("values", "".join(f"{bits:08x} " for bits in values.view(numpy.uint32).tolist()), 9 * 12)
    return "".join(lines)


class Random:
    """Numbers that no version of a library changes."""

    def __init__(self, seed: int):
        self.state = seed

    def number(self) -> float:
        """In -1..1."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 40) / 2**23 - 1.0

    def row(self, of) -> list[float]:
        return [of(i, self.number()) for i in range(256)]


def rows() -> dict[str, list[float]]:
    random = Random(20)
    return {
        "even": random.row(lambda i, x: x),
        "heavy-tails": random.row(lambda i, x: x**7),
        "positive": random.row(lambda i, x: 0.25 + abs(x)),
        "negative": random.row(lambda i, x: -0.5 - abs(x)),
        "zeros": random.row(lambda i, x: 0.0),
        "half-zeros": random.row(lambda i, x: x if x > 0 else -0.0),
        "outlier": random.row(lambda i, x: -300.0 if i == 77 else x / 100),
        "lone": random.row(lambda i, x: 0.5 if i == 200 else 0.0),
        "all-equal": random.row(lambda i, x: -0.7),
        "ties": random.row(lambda i, x: round(x * 4) / 8),
        "sizes": random.row(lambda i, x: x * 2.0 ** -(i // 16)),
        "below-powers": random.row(lambda i, x: math.copysign(2.0 ** (i // 32) * (1 - 2.0**-24), x)),
        "large": random.row(lambda i, x: x * 16000),
        "tiny": random.row(lambda i, x: x * 1e-10),
        "subnormal": random.row(lambda i, x: x * 1e-41),
    }


TYPES = [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K]
TYPES += [Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4]


def blocks_of_values() -> str:
    library = pathlib.Path(llama_cpp.__file__).parent / "lib/libggml-base.so"
    quantise = ctypes.CDLL(str(library)).ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    lines = [f"# By scripts/quants_fixture.py and ggml of llama-cpp-python {llama_cpp.__version__}, x86-64 without FMA.\n"]
    for name, row in rows().items():
        values = numpy.array(row, dtype=numpy.float32)
        lines.append(f"row {name}\n")
        lines += wrapped("values", "".join(f"{bits:08x} " for bits in values.view(numpy.uint32).tolist()), 9 * 12)
        for dtype in TYPES:
            elements, size = GGML_QUANT_SIZES[dtype]
            made = numpy.zeros(values.size // elements * size, dtype=numpy.uint8)
            quantise(dtype.value, values.ctypes.data, made.ctypes.data, 0, 1, values.size, None)
            lines += wrapped(dtype.name, made.tobytes().hex(), 104)
    return "".join(lines)


def main() -> int:
    if sys.argv[1:] not in ([], ["--write"]):
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    for name, text in {"gguf.txt": values_of_blocks(), "ggml.txt": blocks_of_values()}.items():
        file = FOLDER / name
        if sys.argv[1:]:
            file.write_text(text)
        elif file.read_text() != text:
            print(f"{file}: differs from what this script makes (write it with --write)", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
