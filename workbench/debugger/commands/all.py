"""Importing this module fills the registry."""

from lockstep.workbench.debugger.commands import (  # noqa: F401
    branches,
    breakpoints,
    capture,
    diagnose,
    diff,
    frame,
    golden,
    help,
    info,
    lens,
    print,
    record,
    reverse,
    rules,
    run,
    script,
    sequence,
    split,
)
