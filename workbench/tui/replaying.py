"""The debugger behind a replay: the same commands as live, on the recording, on a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.views.where import Where

if TYPE_CHECKING:
    from workbench.debugger.core.debugger import Debugger
    from workbench.debugger.core.registry import Command
    from workbench.debugger.host.messages import CommandAnswer


class Refused(Exception):
    """A command that could not be carried out: why, in words for the message line."""


class Replay:
    """A debugger on a saved session, made when it is first needed: most replays are only looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running: str | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay")
        self._debugger: Debugger | None = None

    async def command(self, line: str, where: Where, inside: bool) -> CommandAnswer:
        """Carry out a command as one who stands at `where`; `inside`: in the middle of the step, behind its tap."""
        self.running = line
        try:
            return await asyncio.wrap_future(self._thread.submit(self._do, line, where, inside))
        finally:
            self.running = None

    async def registry(self) -> list[Command]:
        """Every command there is."""
        return await asyncio.wrap_future(self._thread.submit(self._commands))

    @property
    def stops_at_something(self) -> bool:
        """Whether there is a breakpoint, so that to continue means to look for it."""
        return self._debugger is not None and any(one.enabled for one in self._debugger.breakpoints)

    def interrupt(self) -> None:
        """Stop what runs, between two steps."""
        if self._debugger is not None:
            self._debugger.interrupt()

    def close(self) -> None:
        """End what runs; the session is closed on the thread that opened it."""
        self.interrupt()
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    # --- on the thread -------------------------------------------------------------------------------

    def _made(self) -> Debugger:
        if self._debugger is None:
            # Not at the top: the debugger takes as long to import as the whole screen.
            from workbench.debugger.host.replay import open_replay
            from workbench.export import command as _  # noqa: F401 - enters `export` into the registry

            self._debugger = open_replay(self.path)
        return self._debugger

    def _commands(self) -> list[Command]:
        self._made()
        from workbench.debugger.core.registry import commands

        return list(commands().values())

    def _do(self, line: str, where: Where, inside: bool) -> CommandAnswer:
        from engine.errors import EngineError
        from sessions.errors import SessionError
        from workbench.debugger.answers import Position
        from workbench.debugger.errors import DebuggerError
        from workbench.debugger.host.state import command_answer

        try:
            debugger = self._made()
            at = debugger.position
            place = where.tap if inside else at.place if at.step == where.step else None
            if (at.branch, max(at.step, 0), at.place) != (where.branch, where.step, place):
                debugger.position = Position(where.branch, where.step, place)
            return command_answer(debugger, debugger.execute(line))
        except (DebuggerError, EngineError, SessionError) as error:
            raise Refused(str(error)) from error

    def _end(self) -> None:
        if self._debugger is not None:
            self._debugger.close()
