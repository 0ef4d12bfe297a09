"""What an agent has open: debuggers on models and on sessions, each under a short name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.host.launch import start
from lockstep.workbench.debugger.host.options import Launch, target_of
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.exit_codes import UsageError

#: So many are open at a time; one more closes the oldest.
MOST = 4


class OpenRuns:
    """Debuggers by name, the newest last. Used by one thread at a time."""

    def __init__(self) -> None:
        self._open: dict[str, Debugger] = {}
        self._count = 0

    def start(self, launch: Launch) -> tuple[str, list[str]]:
        """Start a model; its name, and warnings of the start."""
        warnings: list[str] = []
        return self._keep(start(target_of(launch), warnings.append)), warnings

    def replay(self, session: Path) -> str:
        """Open a recording; its name."""
        return self._keep(open_replay(session))

    def find(self, name: str) -> Debugger:
        """By name; "": the newest. UsageError where there is none."""
        if not self._open:
            raise UsageError("nothing is open: call `open` first")
        if name and name not in self._open:
            raise UsageError(f"no run {name!r} is open, but {', '.join(self._open)}")
        return self._open[name or next(reversed(self._open))]

    def session_of(self, name: str) -> Path | None:
        """The recording of a run; None where no run has that name."""
        found = self._open.get(name)
        return None if found is None else found.session.path

    def close(self) -> None:
        """Close all; what was recorded is kept."""
        while self._open:
            self._open.popitem()[1].close()

    def _keep(self, debugger: Debugger) -> str:
        self._count += 1
        name = f"run{self._count}"
        while len(self._open) >= MOST:
            self._open.pop(next(iter(self._open))).close()
        self._open[name] = debugger
        return name


@contextmanager
def limited(debugger: Debugger, seconds: float) -> Iterator[None]:
    """What runs is interrupted after that time, and stops at the next operation."""
    timer = threading.Timer(seconds, debugger.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
