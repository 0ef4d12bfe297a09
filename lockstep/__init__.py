"""Lockstep: a debugger for LLM inference engines."""

# Nothing is imported here: this is the first of Lockstep that runs, and what it imported could come from a stranger's
# working directory (see `workbench.cli`).

__version__ = "0.2.0"
