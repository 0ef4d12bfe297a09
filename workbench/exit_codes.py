"""The exit codes, one meaning each."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from lockstep.engine.text import printable


class Exit(IntEnum):
    """What the process reports to whoever started it."""

    OK = 0
    DIVERGED = 1  # or an `expect` that failed
    USAGE = 2
    CANNOT_LOAD = 3
    NOT_SAVED = 3  # what was asked for was done, but not all of it could be recorded
    TIMEOUT = 4
    RANK_LOST = 5
    INCONCLUSIVE = 6  # the comparison does not suffice
    DEFECT = 70  # EX_SOFTWARE: a bug of ours, never to be taken for a divergence
    INTERRUPTED = 130  # 128 + SIGINT, as shells count
    PIPE_CLOSED = 141  # 128 + SIGPIPE


class UsageError(Exception):
    """A command line that asks for what cannot be; the message states what to write instead."""


def ended_by(number: int, recorded: Sequence[tuple[Path, int]] = ()) -> str:
    """What is reported of a program that a signal has ended. `recorded`: the sessions it leaves, and each one's last
    step (-1: none)."""
    how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    kept = [
        f"; {printable(path, 1000)} is recorded {f'up to step {last}' if last >= 0 else 'without a step'}"
        for path, last in recorded
    ]
    return how + "".join(kept)
