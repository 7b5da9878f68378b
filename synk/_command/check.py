"""Check: `python -m synk check FILE:FUNCTION` tells whether a parallel program gives the answer of one device."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from .._base.errors import SynkError
from .._check.program import DEVICES, SECONDS, check


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Return 0 if the program is right, 1 if a leaf is wrong, 2 if the program cannot run."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = ArgumentParser("python -m synk check", description=__doc__)
    parser.add_argument("target", metavar="FILE:FUNCTION", help="a function that returns a tree of arrays")
    parser.add_argument("--devices", type=numbers, default=DEVICES, metavar="N,N", help="numbers of devices (2,3,4,8)")
    parser.add_argument("--rows", type=numbers, metavar="N,N", help="for a function of a number of rows (24,23)")
    parser.add_argument("--rtol", type=float, help="admitted difference to a leaf's largest number (that of rounding)")
    parser.add_argument("--timeout", type=float, default=SECONDS, help=f"seconds for a run ({SECONDS:g})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        report = check(options.target, options.devices, options.rows, options.rtol, options.timeout, _progress)
    except (SynkError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if sys.stderr.isatty():
            print(end="\r\x1b[K", file=sys.stderr)
    print(report.json() if options.json else report)
    return 0 if report.ok else 1


def _progress(done: int, begun: int) -> None:
    if sys.stderr.isatty():
        print(end=f"\r[{'#' * done}{'.' * (begun - done)}] {done} of {begun} runs", file=sys.stderr, flush=True)
