"""The panes of a workbench: each is made when it is first shown, one is in front."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import ContentSwitcher

from lockstep.workbench.tui.drivers.port import Driver
from lockstep.workbench.tui.message_log import MessageLog
from lockstep.workbench.tui.panes import pane_class, pane_classes
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.widgets.painted import PaintedWidget


class PaneSwitcher(ContentSwitcher, PaintedWidget):
    """Holds the panes by their numbers, from 1."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "back", "Back from what a pane has opened")]

    def __init__(
        self, reader: Reader, messages: MessageLog, driver: Driver, *, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self.reader, self.messages, self.driver = reader, messages, driver
        self.front: Pane | None = None
        self.wanted = 0  # the pane that was asked for last, which comes to the front once it is made; 0: none
        self._made: dict[int, Pane] = {}
        self._making = asyncio.Lock()

    async def bring(self, number: int) -> Pane:
        """Bring a pane to the front."""
        self.wanted = number
        async with self._making:  # two may ask for the same one
            if number not in self._made:
                made = pane_class(number)(self.reader)
                made.live, made.messages = self.driver.live, self.messages
                await self.add_content(made)
                self._made[number] = made
        self.current = f"pane-{number}"
        self.front = self._made[number]
        return self.front

    def load(self) -> None:
        """Import the panes that were not shown yet, off the event loop, so that no key waits for it."""
        self.run_worker(asyncio.to_thread(pane_classes), group="load")

    def show_progress(self) -> None:
        """Of the command that runs, in the pane in front."""
        if self.front is not None:
            self.front.progress(self.driver.stages)

    def action_back(self) -> None:
        """Back from what the pane in front has opened; also where it is empty, and cannot take keys."""
        if self.front is not None:
            self.front.action_back()
