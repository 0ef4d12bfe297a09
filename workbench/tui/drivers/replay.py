"""The debugger behind a replay: the same commands as live, on the recording, on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message_pump import MessagePump

from lockstep.workbench.debugger.core.registry import Command
from lockstep.workbench.debugger.host.messages import DebuggerState
from lockstep.workbench.tui.drivers.port import CommandStage, Reply
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.views.weight_tensor import RankArrays
from lockstep.workbench.views.where import Where

if TYPE_CHECKING:
    from lockstep.workbench.tui.drivers.recorded import RecordedDebugger

_WHY_IDLE = "this is a replay: nothing runs here (lockstep tui MODEL runs one)"


class ReplayDriver:
    """A debugger on a saved session, made when the commands are first asked for; see `port.Driver`."""

    live = False
    opening: Sequence[str] = ()
    stages: Sequence[CommandStage] = ()
    unresponsive = ""
    why_idle = why_no_toggle = _WHY_IDLE

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener: MessagePump | None = None
        self.running: str | None = None
        self.at: DebuggerState | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay")
        self._debugger: RecordedDebugger | None = None

    def state(self, where: Where, busy: bool) -> Fact | None:
        """A search through a long recording; the session alone decides what else is reported."""
        return Fact(f"● {self.running.split()[0]} …", "accent") if busy and self.running else None

    async def commands(self) -> Sequence[Command]:
        """The registry of this process."""
        return await asyncio.wrap_future(self._thread.submit(lambda: self._made().commands()))

    async def run(self, line: str, where: Where) -> Reply:
        """Carry out a command as one who stands where the screen looks; after one that failed it looks there still."""
        self.running, self.at = line, None
        try:
            job = self._thread.submit(lambda: self._made().run(line, where))
            answer = await asyncio.wrap_future(job)
        finally:
            self.running = None
        reply, self.at = answer
        return reply

    async def shares(self, name: str) -> RankArrays:
        """No ranks run."""
        return {}

    def interrupt(self) -> None:
        """Stop what runs, between two steps."""
        if self._debugger is not None:
            self._debugger.interrupt()

    def close(self) -> None:
        """End what runs; the session is closed on the thread that opened it."""
        self.interrupt()
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _end(self) -> None:
        """On the thread."""
        if self._debugger is not None:
            self._debugger.close()

    def _made(self) -> RecordedDebugger:
        """On the thread."""
        if self._debugger is None:
            # Not at the top: importing the debugger and its commands would hold up the first paint.
            from lockstep.workbench.tui.drivers.recorded import RecordedDebugger

            self._debugger = RecordedDebugger(self.path)
        return self._debugger
