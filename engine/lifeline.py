"""A pipe by which a child process ends with the one that started it (torch-free).

The starter alone holds the writing end, and the system closes that however the starter ends; while it is merely stopped
nothing happens. The child inherits the reading end, whose number it is given.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
from collections.abc import Callable


class Lifeline:
    """The starter's side. `fd` is for the child to inherit."""

    def __init__(self) -> None:
        self.fd, self._held = os.pipe()

    def handed_over(self) -> None:
        """The child has been started (or could not be)."""
        os.close(self.fd)

    def close(self) -> None:
        """The child is gone, or is to go. Safe to call again."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def end_with_starter(fd: int, tidy: Callable[[], object]) -> None:
    """The child's side, whatever it is doing: when its starter is gone, `tidy` and end as if a terminal had closed.

    A child that ends by itself just then, because it writes to a pipe that its starter held, waits for the tidying.
    """

    def watch() -> None:
        os.read(fd, 1)
        try:
            tidy()
        finally:
            os._exit(128 + signal.SIGHUP)

    watcher = threading.Thread(target=watch, name="lifeline", daemon=True)
    watcher.start()
    atexit.register(_end_tidied, fd, watcher)


def _end_tidied(fd: int, watcher: threading.Thread) -> None:
    if select.select([fd], [], [], 0)[0]:
        watcher.join()
