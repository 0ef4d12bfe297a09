"""Interrupting the command that runs."""

from __future__ import annotations

import threading

from lockstep.engine.ranks.client import Client
from lockstep.workbench.debugger.errors import Interrupted


class Interrupts:
    """Whether the command that runs is to stop. `wanted` may be set from any thread, or a signal handler."""

    def __init__(self) -> None:
        self.running = False  # whether there is a command to interrupt
        self._wanted = threading.Event()
        self._sent = False  # the ranks were notified

    @property
    def wanted(self) -> bool:
        """Whether what runs is to stop."""
        return self._wanted.is_set()

    def ask(self, *, ahead: bool) -> None:
        """Interrupt what runs; `ahead`: also a command that is about to begin."""
        if self.running or ahead:
            self._wanted.set()

    def check(self) -> None:
        """Interrupted, if what runs is to stop."""
        if self.wanted:
            raise Interrupted("interrupted")

    def pass_on(self, client: Client) -> None:
        """Interrupt the ranks, once."""
        if self.wanted and not self._sent:
            self._sent = True
            client.interrupt()

    def forget(self, client: Client | None) -> None:
        """What was to be interrupted is over."""
        self._wanted.clear()
        if self._sent and client is not None and client.alive:
            client.clear_interrupt()
        self._sent = False
