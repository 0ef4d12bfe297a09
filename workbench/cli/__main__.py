"""`python -m lockstep.workbench.cli`."""

import sys

from lockstep.workbench.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
