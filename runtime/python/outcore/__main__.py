"""The program `outcore` of this package: the commands of `outcore --help`, and `serve`."""

import signal
import sys

from ._native import main as run


def main() -> int:
    # Signals do what they do to a program that Python has not started. Python's handler of Ctrl-C would only run when
    # the command is done, and a signal that Python ignores would stay ignored in the program of `outcore run`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    return run(["outcore", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
