"""`python -m workbench.tui`."""

import sys

from workbench.tui.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
