"""One line on stderr that shows what is going on, where there is a terminal to see it."""

from __future__ import annotations

import sys
import threading

from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.library.listening import Listener


class Status(Listener):
    """A line that is written over, and gone when the work is. Silent where stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._lock = threading.Lock()  # recorders report from a thread of their own

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the line away, before something is printed."""
        self._write("")

    def report(self, text: str) -> None:
        """Show `text` until the next."""
        self._write(f"lockstep: {text}…")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        report_line(text)

    def warn(self, text: str) -> None:
        """Print a warning that stays."""
        self.note(f"warning: {text}")

    def count(self, what: str, done: int, of: int) -> None:
        """Show how far a recording has come; `of` 0: it is not counted."""
        self.report(f"{what}: {done} of {of}" if of else what)

    def _write(self, text: str) -> None:
        if self._shown:
            with self._lock:
                sys.stderr.write(f"\r\x1b[2K{text}")
                sys.stderr.flush()
