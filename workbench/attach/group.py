"""A command with its watcher: the terminal is its, signals reach it, and nothing of it stays, whoever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lockstep.engine.lifeline import Lifeline
from lockstep.workbench.attach import watcher
from lockstep.workbench.attach.watcher import FORWARDED, foreground, give_terminal

#: Seconds that processes may outlive the command before they are asked to end, and then until they are killed.
PATIENCE, GRACE = 10.0, 5.0
#: Seconds between two looks at whether a command is done.
_LOOK = 0.1


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How a command ended: its exit code, -N where signal N ended it; and the signals that it was passed on."""

    code: int
    passed_on: tuple[int, ...] = ()


def run_in_group(
    command: Sequence[str],
    environment: Mapping[str, str],
    scratch: Path | None = None,
    *,
    patience: float = PATIENCE,
    grace: float = GRACE,
    done: Callable[[], bool] | None = None,
) -> GroupEnd:
    """Run a command to its end with our standard streams.

    OSError where it cannot be started. Where standard input is our terminal it is the command's for that while: ctrl+c
    and ctrl+z reach the command as without us. Should this process be killed, all that the command started is ended,
    and then the temporary folder `scratch`, which it may write to, is removed. Once `done()`, the command is asked to
    end (SIGINT, and a while later SIGTERM).
    """
    lifeline = Lifeline()
    stated, stating = os.pipe()
    settings = [lifeline.fd, stating, os.getpgrp(), os.getpid(), patience, grace, scratch or ""]
    words = [*map(str, settings), os.pathsep.join(sys.path), *command]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", watcher.__file__, *words], env=environment, process_group=0,
            pass_fds=(lifeline.fd, stating),
        )  # fmt: skip
    except OSError:
        os.close(stated)
        lifeline.close()
        raise
    finally:
        os.close(stating)
        lifeline.handed_over()
    with (
        _forwarding(process) as passed_on,
        _ending(process, done),
        os.fdopen(stated, encoding="ascii") as reported,
    ):
        report = {word: int(value) for word, value in map(str.split, reported)}
        process.wait()
    lifeline.close()
    if "failed" in report:
        raise OSError(report["failed"], os.strerror(report["failed"]))
    child = report.get("started", 0)
    if foreground() == child != 0:
        give_terminal(os.getpgrp())
    if "ended" not in report and child:  # its watcher was killed
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    return GroupEnd(report.get("ended", process.returncode), tuple(passed_on))


@contextmanager
def _ending(process: subprocess.Popen[bytes], done: Callable[[], bool] | None) -> Iterator[None]:
    """Meanwhile, see whether the command is `done`."""
    over = threading.Event()

    def see() -> None:
        while done is not None and not over.wait(_LOOK):
            if done():
                for number in (signal.SIGINT, signal.SIGTERM):  # as ctrl+c would: engines clean up after that
                    with suppress(ProcessLookupError):
                        process.send_signal(number)
                    if over.wait(GRACE):
                        return
                return

    looking = threading.Thread(target=see, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Hand signals to the watcher; SIGCONT as well, as of `fg`. Which of them the command was to get is noted."""
    passed_on: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if number in FORWARDED:
            passed_on.append(number)
        with suppress(ProcessLookupError, PermissionError):
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (*FORWARDED, signal.SIGCONT)}
    try:
        yield passed_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
