"""The workbench on a saved session: the same screen; what would need the model is greyed and says why."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from textual import work

from sessions.text import clean
from workbench.tui.reader import Reader
from workbench.tui.replaying import Refused, Replay
from workbench.tui.screens import keys
from workbench.tui.screens.workbench import WorkbenchScreen
from workbench.views.where import Where

if TYPE_CHECKING:
    from workbench.debugger.host.messages import CommandAnswer


class ReplayWorkbench(WorkbenchScreen):
    """Keys move about in what was recorded; the `:` line is the debugger's, on the recording."""

    def __init__(self, reader: Reader, *, at: Where | None = None) -> None:
        super().__init__(reader, at=at)
        self.replay = Replay(reader.source.path)

    async def carry_out(self, line: str, quiet: bool) -> None:
        """Have the debugger do it, and go where it went."""
        if self.replay.running is not None:
            self.tell(f"{self.replay.running} is still running: ctrl+c interrupts it")
            return
        try:
            reply = await self.replay.command(line, self.where, self.inside)
        except Refused as problem:
            self.tell(clean(str(problem), limit=300), wrong=True)
            return
        self._follow(reply)
        if not quiet or reply.result.get("kind") == "message":
            self.show_reply(line, reply)

    def _follow(self, reply: CommandAnswer) -> None:
        """Look at where the debugger stands now."""
        assert self.overview is not None
        taps, tap = self.overview.taps, reply.state.tap
        self.inside = tap is not None
        where = replace(self.where, branch=reply.state.branch, step=max(0, reply.state.step))
        self.where = replace(where, tap=taps.index(tap)) if tap in taps else where

    async def move(self, kind: str, by: int, times: int = 1) -> None:
        """Within the recording; where breakpoints were set, to continue is to look for the next of them."""
        if kind == "stop" and self.replay.stops_at_something:
            self.run_command("continue" if by > 0 else "reverse-continue")
        else:
            await super().move(kind, by, times)

    def why_no_toggle(self) -> str:
        """Nothing runs here."""
        return keys.REPLAY

    def why_not(self, press: str) -> str:
        """Keys that would need the model are greyed."""
        return keys.REPLAY if press in keys.ENGINE_ONLY else ""

    async def action_interrupt(self) -> None:
        """ctrl+c."""
        if self.replay.running is None:
            await super().action_interrupt()
        else:
            self.replay.interrupt()

    @work(group="registry", exclusive=True)
    async def _learn_commands(self) -> None:
        """What the debugger can do, for the completions; asked when the line is first opened."""
        try:
            self.registry = await self.replay.registry()
        except Refused as problem:
            self.tell(str(problem), wrong=True)

    def action_command(self) -> None:
        """The colon."""
        if not self.registry:
            self._learn_commands()
        super().action_command()

    def on_unmount(self) -> None:
        """The debugger goes with its screen."""
        self.replay.close()
