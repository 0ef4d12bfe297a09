"""A command in a process group of its own: the terminal is its, signals reach all of it, and none of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import psutil

#: Signals that are passed on to the command. What it has written is then still there to be read.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds that processes may outlive the command before they are asked to end, and then until they are killed.
_PATIENCE, _GRACE = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How a command ended: its exit code, -N where signal N ended it; and the signals that it was passed on."""

    code: int
    passed_on: tuple[int, ...] = ()


def run_in_group(command: Sequence[str], environment: Mapping[str, str]) -> GroupEnd:
    """Run a command to its end with our standard streams.

    OSError where it cannot be started. Where standard input is our terminal it is the command's for that while: ctrl+c
    and ctrl+z reach the command as without us.
    """
    child = subprocess.Popen(command, env=environment, process_group=0)
    with _forwarding(child.pid) as passed_on, _terminal_of(child.pid):
        while True:
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            if os.WSTOPSIG(status) not in (
                signal.SIGTTIN,
                signal.SIGTTOU,
            ):  # which it got before it had the terminal
                _give_terminal(os.getpgrp())
                os.kill(os.getpid(), signal.SIGSTOP)  # ctrl+z stops us as well, and `fg` sets both going
            _give_terminal(child.pid)
            os.killpg(child.pid, signal.SIGCONT)
        child.returncode = os.waitstatus_to_exitcode(status)
        _end_leftovers(child.pid)
    return GroupEnd(child.returncode, tuple(passed_on))


def _end_leftovers(group: int) -> None:
    """Wait until no process of the group is left; who stays is terminated, then killed."""
    for number, seconds in ((0, _PATIENCE), (signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not _alive(group):
                return
            time.sleep(0.05)


def _alive(group: int) -> bool:
    """Whether a process of the group still runs. A zombie that nobody reaps does not: containers may keep those."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


@contextmanager
def _forwarding(group: int) -> Iterator[list[int]]:
    passed_on: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        passed_on.append(number)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield passed_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _terminal_of(group: int) -> Iterator[None]:
    if not os.isatty(0) or os.tcgetpgrp(0) != os.getpgrp():
        yield
        return
    _give_terminal(group)
    try:
        yield
    finally:
        _give_terminal(os.getpgrp())


def _give_terminal(group: int) -> None:
    """Make a group the terminal's foreground one; nothing where standard input is no terminal."""
    if not os.isatty(0):
        return
    stopped = signal.signal(
        signal.SIGTTOU, signal.SIG_IGN
    )  # which a group in the background gets for this call
    try:
        with suppress(OSError):
            os.tcsetpgrp(0, group)
    finally:
        signal.signal(signal.SIGTTOU, stopped)
