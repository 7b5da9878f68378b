"""`python -m synk`: `launch` one program in several processes, `info` of what there is, `bench` how a step scales,
`migrate` what programs with jax.pmap become."""

import sys

from ._distributed.launcher import main
from ._explain.bench import bench
from ._explain.info import report
from ._migrate.report import migrate

if __name__ == "__main__":
    if sys.argv[1:] == ["info"]:
        print(report())
    elif sys.argv[1:2] == ["bench"]:
        sys.exit(bench(sys.argv[2:]))
    elif sys.argv[1:2] == ["migrate"]:
        sys.exit(migrate(sys.argv[2:]))
    else:
        sys.exit(main())
