"""Importing this module fills the registry."""

from workbench.debugger import (  # noqa: F401
    branching,
    breaking,
    capturing,
    changing,
    checking,
    comparing,
    describing,
    golden,
    lens,
    looking,
    reversing,
    running,
    scripting,
    tensors,
)
