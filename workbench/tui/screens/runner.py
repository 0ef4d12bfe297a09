"""Command lines on their way to the debugger, one after another, however fast they are typed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from lockstep.sessions.text import clean
from lockstep.workbench.tui.drivers.port import CommandFailed, Driver, Reply
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.plain_text import plural

#: Seconds after which what runs is reported as running.
_REPORT_AFTER = 0.2
#: How many commands may wait behind the one that runs.
_MOST_WAITING = 8


class CommandRunner:
    """Runs command lines on a driver. `looking` gives the place that the screen looks at, `arrived` has it follow the
    debugger, and look at the sequence that a command has chosen (None: none has), `report(text, wrong)` writes into the
    message line."""

    def __init__(
        self,
        driver: Driver,
        looking: Callable[[], Where],
        arrived: Callable[[int | None], Awaitable[None]],
        report: Callable[[str, bool], None],
    ) -> None:
        self.driver = driver
        self.waiting = 0  # commands behind the one that runs
        self.report = report
        self._looking, self._arrived = looking, arrived
        self._turn = asyncio.Lock()
        self._began = 0.0
        self._interrupts = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the command that runs began; 0 while none does."""
        return 0.0 if self.driver.running is None else time.monotonic() - self._began

    @property
    def busy(self) -> bool:
        """Whether a command has been running for so long that it is reported."""
        return self.elapsed > _REPORT_AFTER

    @property
    def progress(self) -> str:
        """What runs, for how long, and how many commands wait behind it."""
        full = " (no more are taken)" if self.waiting >= _MOST_WAITING else ""
        waiting = f"   {plural(self.waiting, 'command')} waiting{full}" if self.waiting else ""
        stage = f"   {self.driver.stages[-1].summary}" if self.driver.stages else ""
        return f"{self.driver.running}{stage}   {self.elapsed:.0f} s{waiting}   ctrl+c interrupts"

    async def run(self, line: str) -> Reply | None:
        """Carry out a command and show where that led. None: it was not, and why has been reported.

        While one runs the next may be given: keys are typed faster than steps are run and rules are changed. An
        interrupt takes back those that wait.
        """
        if self.waiting >= _MOST_WAITING:
            self.report(self.progress, True)
            return None
        interrupts = self._interrupts
        self.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.waiting -= 1  # also where the worker that waits here is cancelled
        try:
            return await self._run(line) if interrupts == self._interrupts else None
        finally:
            self._turn.release()

    async def _run(self, line: str) -> Reply | None:
        self._began, sent = time.monotonic(), self._looking()
        try:
            reply = await self.driver.run(line, sent)
        except CommandFailed as error:
            await self._arrived(None)
            self.report(clean(str(error), newlines=True), True)
            return None
        at = self.driver.at
        await self._arrived(at.sequence if at is not None and at.sequence != sent.seq else None)
        return reply

    def interrupt(self) -> None:
        """Stop what runs, and forget what waits."""
        running = self.driver.running
        if running is None:
            self.report("nothing runs; ctrl+q quits", False)
            return
        self._interrupts += 1
        self.driver.interrupt()
        self.report(f"interrupting {running} …", False)
