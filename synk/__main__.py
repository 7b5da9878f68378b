"""`python -m synk launch`: one program in several processes of this machine."""

import sys

from ._distributed.launcher import main

if __name__ == "__main__":
    sys.exit(main())
