"""Importing this module fills the registry."""

from workbench.debugger.commands import (  # noqa: F401
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
