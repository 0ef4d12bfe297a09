"""`python -m lockstep.workbench.tui`."""

import sys

from lockstep.workbench.error_log import guarded


def _program() -> int:
    from lockstep.workbench.tui.launch import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(guarded(_program))
