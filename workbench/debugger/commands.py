"""Importing this module fills the registry."""

from workbench.debugger import (  # noqa: F401
    branching,
    breaking,
    changing,
    checking,
    comparing,
    describing,
    golden,
    looking,
    reversing,
    running,
    scripting,
    tensors,
)
