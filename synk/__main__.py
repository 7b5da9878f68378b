"""`python -m synk`: `launch` a program in several processes, `check` a parallel program, `info` of what there is."""

import sys

from ._command.check import main as check
from ._command.launcher import main
from ._explain.info import info

if __name__ == "__main__":
    if sys.argv[1:] == ["info"]:
        print(info())
    elif sys.argv[1:2] == ["check"]:
        sys.exit(check(sys.argv[2:]))
    else:
        sys.exit(main())
