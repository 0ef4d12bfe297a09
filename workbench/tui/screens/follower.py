"""Keeps the workbench where the debugger stands."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from lockstep.workbench.tui.drivers.port import Driver
from lockstep.workbench.tui.navigator import Navigator, updated
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.screens.bench import Bench
from lockstep.workbench.views.overview import overview
from lockstep.workbench.views.source import SessionSource


class Follower:
    """Reads what a command wrote and looks at where it led."""

    def __init__(self, bench: Bench, reader: Reader, driver: Driver, navigator: Navigator) -> None:
        self.bench, self.reader, self.driver, self.navigator = bench, reader, driver, navigator
        #: Whether steps were reported that were not looked at yet.
        self.behind = False
        self._turn = asyncio.Lock()
        self._stood: tuple[int, int, str | None] | None = (
            None  # where the debugger stood when it was followed last
        )

    async def follow(self, chosen: int | None = None, *, back: bool = False) -> None:
        """Look at where the debugger stands, if it has moved there since (or to come `back`), and at the sequence that
        a command has `chosen`. One at a time: the last word is the latest."""
        async with self._turn:
            self.behind = False
            bench, at = self.bench, self.driver.at
            if self.driver.live:
                if at is not None and Path(at.session) != self.reader.source.path:
                    await self.reader.ask(SessionSource.move, Path(at.session))
                await self.reader.ask(SessionSource.refresh)
                bench.overview = await self.reader.ask(overview)
            if at is not None and bench.overview is not None:
                stands = at.branch, at.step, at.tap
                moved, self._stood = stands != self._stood, stands
                before = bench.place
                here = before if chosen is None else replace(before, seq=chosen)
                # What the user does while this is read is not taken back.
                if moved or back:
                    there = await self.navigator.of_debugger(at, here, bench.overview)
                    kept: tuple[str, ...] = ("rank", "seq") if at.tap else ("tap", "rank", "seq")
                else:
                    there = await self.navigator.nearest(here)
                    kept = ("branch", "step", "tap", "rank", "seq")
                bench.look(updated(there, before, bench.place, kept))
            if bench.front is None:
                await bench.show_some_pane()
