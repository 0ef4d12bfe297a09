"""Keeps the workbench where the debugger stands."""

from __future__ import annotations

import asyncio
from pathlib import Path

from workbench.tui.drivers.port import Driver
from workbench.tui.navigator import Navigator
from workbench.tui.reader import Reader
from workbench.tui.screens.bench import Bench
from workbench.views.overview import overview
from workbench.views.source import SessionSource


class Follower:
    """Reads what a command wrote and looks at where it led."""

    def __init__(self, bench: Bench, reader: Reader, driver: Driver, navigator: Navigator) -> None:
        self.bench, self.reader, self.driver, self.navigator = bench, reader, driver, navigator
        #: Whether steps were told of that were not looked at yet.
        self.behind = False
        self._turn = asyncio.Lock()

    async def follow(self) -> None:
        """Look at where the debugger stands. One at a time: the last word is the latest."""
        async with self._turn:
            self.behind = False
            bench, at = self.bench, self.driver.at
            if self.driver.live:
                if at is not None and Path(at.session) != self.reader.source.path:
                    await self.reader.ask(SessionSource.move, Path(at.session))
                await self.reader.ask(SessionSource.refresh)
                bench.overview = await self.reader.ask(overview)
            if at is not None and bench.overview is not None:
                bench.look(await self.navigator.of_debugger(at, bench.place, bench.overview))
            if bench.front is None:
                await bench.show_pane(1)
