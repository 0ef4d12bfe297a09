"""Importing this module fills the registry: the groups in the order of the manual."""

from workbench.debugger import (  # noqa: F401
    breaking,
    capturing,
    changing,
    checking,
    describing,
    golden,
    lens,
    looking,
    reversing,
    running,
    scripting,
)  # isort: skip
