"""`python -m synk launch`: one program in several processes; `python -m synk info`: what there is to run on."""

import sys

from ._distributed.launcher import main
from ._info import report

if __name__ == "__main__":
    if sys.argv[1:] == ["info"]:
        print(report())
    else:
        sys.exit(main())
