#!/usr/bin/env python3
"""What the package `gguf` makes of blocks of IQ4_NL, IQ4_XS and MXFP4: the file that examples/llm's tests compare with.

    quants_fixture.py              check that the file has what this script makes
    quants_fixture.py --write      write it

It needs `pip install gguf==0.19.0` (MIT), which decodes as ggml does, and no network. The file has blocks at the ends
of what scales can be; a line of it begins with `type`, `block` or `values`, and the last two go on from line to line.
Values are the bits of f32 numbers.
"""

import pathlib
import struct
import sys

import numpy
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

FILE = pathlib.Path(__file__).resolve().parent.parent / "examples/llm/src/quants/gguf.txt"
HEAD = "# By scripts/quants_fixture.py and gguf 0.19.0.\n"
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


def made() -> str:
    lines = [HEAD]
    for dtype, block in blocks():
        # Of a power of two that is no number for others, products are infinite.
        with numpy.errstate(over="ignore"):
            values = dequantize(numpy.frombuffer(block, dtype=numpy.uint8), dtype)
        lines.append(f"type {dtype.name}\n")
        lines += wrapped("block", block.hex(), 96)
        lines += wrapped("values", "".join(f"{bits:08x} " for bits in values.view(numpy.uint32).tolist()), 9 * 12)
    return "".join(lines)


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(made())
        return 0
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    if FILE.read_text() != made():
        print(f"{FILE}: differs from what this script makes (write it with --write)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
