"""`python -m synk`: `launch` one program in several processes, `info` of what there is, `bench` how a step scales."""

import sys

from ._distributed.launcher import main
from ._explain.bench import bench
from ._explain.info import report

if __name__ == "__main__":
    if sys.argv[1:] == ["info"]:
        print(report())
    elif sys.argv[1:2] == ["bench"]:
        sys.exit(bench(sys.argv[2:]))
    else:
        sys.exit(main())
