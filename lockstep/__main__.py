"""`python -m lockstep`: the command line."""

import sys

from lockstep.workbench.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
