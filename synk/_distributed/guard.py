"""Guard: run by itself, it reads process groups from its standard input, and ends them when that ends."""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Lines are `+group` and `-group`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides
    groups = set[int]()
    for line in sys.stdin.buffer:
        (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
