"""One line on stderr that shows what is going on, where there is a terminal to see it."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from lockstep.engine.text import printable
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.library.listening import Listener

#: Columns of a terminal that does not state how many it has.
_USUAL = 80


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
        """Show `text` until the next, as much of it as one line has room for."""
        self._write(printable(f"lockstep: {text}…", _columns() - 1))

    def found(self, text: str) -> None:
        """Print a line that stays, for who waits for the verdict."""
        if self._shown:
            self.note(f"so far: {text}")

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


def _columns() -> int:
    """Those of the terminal behind stderr: a longer line would wrap, and its beginning could not be written over."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL
    return _USUAL
