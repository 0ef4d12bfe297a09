"""The exit codes, one meaning each."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the process says to whoever started it."""

    OK = 0
    DIVERGED = 1  # or an `expect` that failed
    USAGE = 2
    CANNOT_LOAD = 3
    TIMEOUT = 4
    RANK_LOST = 5
    DEFECT = 70  # EX_SOFTWARE: a bug of ours, never to be taken for a divergence
    INTERRUPTED = 130  # 128 + SIGINT, as shells count
    PIPE_CLOSED = 141  # 128 + SIGPIPE


class UsageError(Exception):
    """A command line that asks for what cannot be; the message says what to write instead."""
