"""Trials of the screens in a real terminal: processes killed while golden is recorded or an export written, and a long
session on a busy machine."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.verify import verify
from tests.e2e.terminal import Terminal, terminal
from tests.engine.ranks.test_hangs import busy
from tests.soak.processes import check_tokens, model
from tests.workbench.debugger.host.test_ending import folded

_SESSION = "live.session"
_RECORDER, _HOST, _SCREENS = (
    "lockstep.workbench.references.record",
    "lockstep.workbench.cli.host",
    "lockstep.workbench.cli",
)
#: Seconds that anything on the screens may take with twenty processes on two cores.
_BUSY = 240.0
#: The status of ranks that wait for a command: after a `restart` they stand before the first step.
_AT_REST = re.compile("● (stopped|before step 0)")
#: What a long session is made of, as commands: motions, branches, and files.
_LONG = (
    "next 40",
    "toggle load_bias false",
    "next 20",
    "branch 0",
    "restart",
    "golden",
    "export html x{turn}.html",
)


def _begin(here: Terminal, seconds: float = 60.0) -> None:
    here.start(f"lockstep tui {model()} --tp 2 --ids 3,14,15 --save {_SESSION}")
    here.wait("● stopped", "step 0/0", seconds=seconds)


def _command(here: Terminal, line: str) -> None:
    here.type(":")
    here.enter(line)


def _await_turn(here: Terminal, file: Path) -> None:
    """Waits for what the last command of a turn writes. The commands wait for each other, and each has its time."""
    here.until(lambda _: file.exists(), lambda _: f"{file.name} is not written", len(_LONG) * _BUSY)


def kill_at_golden(seed: int, directory: Path) -> None:
    """The recorder of transformers' reference (half-way in its passes, or before), the host, or the screens that wait
    for it; every fourth time while an export is written instead."""
    chance, place = random.Random(seed), directory / "terminal"
    place.mkdir()
    victim = (_RECORDER, _HOST, _SCREENS)[seed % 3]
    with terminal(place) as here:
        _begin(here)
        _command(here, "next 12")
        here.wait("step 12/12")
        if seed % 4 == 3:
            _command(here, "export report x.html")
        else:
            _command(here, "golden")
            here.until(lambda _: here.of(_RECORDER), lambda _: "no recorder")
        _kill_some_time(here, victim, chance, place / "cache" / "golden")
        if victim == _SCREENS:
            here.nothing_is_left()
        else:
            _goes_on(here, ended=victim == _HOST)
            here.press("C-q")
            here.back_in_shell()
            if victim == _HOST:  # who records next folds it
                SessionWriter.reopen(place / _SESSION).close()
            here.nothing_is_left()
        assert folded(place / _SESSION) >= 12
        check_tokens(place / _SESSION, 12)
        for path in (place / "cache").rglob("*"):
            if path.is_file() and path.suffix == ".session":
                assert verify(path) == [], f"half made: {path.name}"
        assert not [path for path in place.glob("x.html*") if path.name != "x.html"], "half an export is left"


def _kill_some_time(here: Terminal, victim: str, chance: random.Random, cache: Path) -> None:
    """At once, in some seconds, or (1 of 2) as soon as some passes of the reference are recorded."""
    moment = time.monotonic() + chance.uniform(0, 5.0)
    if chance.random() < 0.5:
        while not any(path.stat().st_size for path in cache.glob("*/*.session-wal")) and here.of(_RECORDER):
            time.sleep(0.005)
    while time.monotonic() < moment and (victim != _RECORDER or here.of(_RECORDER)):
        time.sleep(0.01)
    with suppress(IndexError, ProcessLookupError):  # it was done before
        here.signal(victim, signal.SIGKILL)


def _goes_on(here: Terminal, *, ended: bool) -> None:
    """The screens live: they show that the host has ended, or take the next step."""
    if ended:
        here.wait(re.compile(r"host has ended|engine is gone|ended|lost"))
        return
    here.press("Escape")
    _command(here, "next")
    here.wait("step 13/13")


def long_session(
    seed: int, directory: Path, *, seconds: float = 900.0, steps: int = 4000, load: int = 20
) -> None:
    """Steps, branches, exports, restarts and golden recordings beside `load` busy processes, until there are `steps`
    steps or the time is over; the screens answer all along."""
    place = directory / "terminal"
    place.mkdir()
    with busy(load), terminal(place) as here:
        _begin(here, _BUSY)
        end, turn, made = time.monotonic() + seconds, 0, 0
        screens = psutil.Process(here.of(_SCREENS)[0])
        while time.monotonic() < end and made < steps:
            for line in _LONG:
                _command(here, line.format(turn=turn))
                here.wait(_AT_REST, seconds=_BUSY)
            # The status may be that of before a command: what is written shows that all of the turn was done.
            _await_turn(here, place / f"x{turn}.html")
            with Session.open(place / _SESSION) as session:
                made = sum(len(session.steps(branch.id)) for branch in session.branches())
            turn += 1
        assert made > 40, f"{made} steps in {turn} turns"
        assert screens.memory_info().rss < 1 << 30, "the screens have grown beyond a GiB"
        here.press("C-q")
        here.until(lambda _: not here.of(_SCREENS), lambda _: "the screens do not leave", _BUSY)
        here.nothing_is_left(_BUSY)
        assert verify(place / _SESSION) == []
        assert (place / f"x{turn - 1}.html").stat().st_size
    print(f"screens-long: {made} steps, {turn} turns, process {os.getpid()}", flush=True)
