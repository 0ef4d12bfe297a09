"""One kind of trial, and how one try of it is carried out: in a folder of its own, within a time, leaving nothing."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import psutil

#: Names every process that a try started, whoever its parent is by now.
_MARK = "LOCKSTEP_SOAK_TRY"
#: Folders of logs that torchrun leaves where a rank of its was lost.
_NOT_OURS = "torchelastic_"
#: Seconds that processes have to end after a try, before they count as left behind.
_ENDING = 20.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Something that is done `tries` times. `act(seed, directory)` raises where anything is lost.

    `quick`: how many tries of it `make test` has, where no other tests of the suite have a tenth already."""

    name: str
    done: str
    survived: str
    act: Callable[[int, Path], None]
    tries: int
    quick: int = 0
    seconds: float = 120.0  # of one try: what takes longer hangs


class TooSlow(BaseException):
    """A try took longer than it may. No test's `except Exception` takes it for something else."""


@cache
def shared() -> Path:
    """A folder for what all tries of this process need; it goes with the process."""
    place = Path(tempfile.mkdtemp(prefix="soak-shared-", dir="/tmp"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


def attempt(trial: Trial, seed: int) -> str:
    """One try; what was lost, "" for nothing."""
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # short: sockets lie below it
    mark = uuid.uuid4().hex
    with _surroundings(directory, mark):
        try:
            with _bounded(trial.seconds):
                trial.act(seed, directory)
            lost = ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            lost = evidence(error).replace(str(directory), "…")
        left = _left(mark)
        if left and not lost:
            lost = f"left running: {'; '.join(left)}"
        litter = sorted(
            path.name for path in (directory / "tmp").iterdir() if not path.name.startswith(_NOT_OURS)
        )
        if litter and not lost:
            lost = f"left in the temporary folder: {', '.join(litter)}"
    shutil.rmtree(directory, ignore_errors=True)
    return lost


def evidence(error: BaseException) -> str:
    """Where in the tests it was raised, and what it states: one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/" in frame.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    stated = " ".join(str(error).split())
    return f"{where} — {type(error).__name__} {stated}"[:400]


@contextlib.contextmanager
def _surroundings(directory: Path, mark: str) -> Iterator[None]:
    """Temporary files, sessions, caches and settings of the try's own; all its processes bear its mark."""
    folders = {
        "TMPDIR": "tmp", "LOCKSTEP_DATA_DIR": "data", "LOCKSTEP_CACHE_DIR": "cache", "LOCKSTEP_STATE_DIR": "state",
        "XDG_CONFIG_HOME": "config",
    }  # fmt: skip
    before, temporary = dict(os.environ), tempfile.tempdir
    for variable, name in folders.items():
        (directory / name).mkdir()
        os.environ[variable] = str(directory / name)
    os.environ[_MARK] = mark
    tempfile.tempdir = str(directory / "tmp")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = temporary


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    theirs = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *theirs)


def _left(mark: str) -> list[str]:
    """The processes of a try that do not end, which are then killed."""
    deadline = time.monotonic() + _ENDING
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return [str(process) for process in found]


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended while it was looked at
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark:
                found.append(process)
    return found
