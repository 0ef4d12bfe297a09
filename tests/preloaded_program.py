"""`python -m tests.preloaded_program ADDRESS MODULE WORDS`: a module in a process of its own, whose children are forked
by the server of `tests.preloaded` that listens there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from lockstep.engine import children
from tests.preloaded import Forking, Server


def command_of(module: str, *words: str) -> list[str]:
    """What Python is given to run `module`; plainly so where a test, or no test at all, has its processes new."""
    if not isinstance(children.subprocess, Forking):
        return ["-m", module, *words]
    server = children.subprocess.server
    server.ensure_started()
    return ["-m", "tests.preloaded_program", server.address, module, *words]


if __name__ == "__main__":
    _, address, name, *rest = sys.argv
    children.subprocess = Forking(Server(Path(address), elsewhere=True))  # type: ignore[assignment]
    sys.argv[1:] = rest
    runpy.run_module(name, run_name="__main__", alter_sys=True)
