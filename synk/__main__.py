"""`python -m synk`: `launch` one program in several processes, `info` of what there is, `bench` how a step scales,
`migrate` what programs with jax.pmap become."""

import sys

from ._command.bench import bench
from ._command.check import main as check
from ._command.launcher import main
from ._command.migrate import migrate
from ._explain.info import info

if __name__ == "__main__":
    if sys.argv[1:] == ["info"]:
        print(info())
    elif sys.argv[1:2] == ["check"]:
        sys.exit(check(sys.argv[2:]))
    elif sys.argv[1:2] == ["bench"]:
        sys.exit(bench(sys.argv[2:]))
    elif sys.argv[1:2] == ["migrate"]:
        sys.exit(migrate(sys.argv[2:]))
    else:
        sys.exit(main())
