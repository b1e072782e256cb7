"""The program `outcore` of this package."""

import sys

from . import __version__

USAGE = "usage: outcore --version"


def main() -> int:
    if sys.argv[1:] == ["--version"]:
        print(f"outcore {__version__}")
        return 0
    print(f"{USAGE}\nThe commands run, top, doctor and serve are those of the programs that Cargo builds.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
