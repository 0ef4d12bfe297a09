"""From a tap or a parameter to the screen that shows its values."""

from __future__ import annotations

from textual.screen import Screen

from sessions.text import clean
from workbench.tui.drivers.port import CommandFailed
from workbench.tui.reader import Reader
from workbench.tui.screens.runner import CommandRunner
from workbench.tui.screens.tensor import TensorScreen
from workbench.tui.screens.weight import WeightScreen
from workbench.views.overview import Overview
from workbench.views.source import SessionSource
from workbench.views.weight_tensor import RankArrays
from workbench.views.where import Where

#: The most elements of a parameter that the ranks are asked to send.
_SENT = 8_000_000


class TensorOpener:
    """Opens tensors over a screen; a running model is asked for what the session does not have."""

    def __init__(self, screen: Screen[None], reader: Reader, runner: CommandRunner) -> None:
        self.screen, self.reader, self.runner = screen, reader, runner

    async def open_tap(self, overview: Overview, where: Where) -> None:
        """The tensor of the tap at `where`."""
        driver = self.runner.driver
        idle = driver.live and driver.running is None and not driver.why_idle
        if idle and not await self.reader.ask(_is_captured, where):
            await self.runner.run(f"print {overview.taps[where.tap]}")
        self.screen.app.push_screen(TensorScreen(self.reader, overview, where))

    async def open_weight(self, overview: Overview, where: Where, name: str, size: int) -> None:
        """A parameter of `size` elements."""
        shares: RankArrays = {}
        if size <= _SENT:
            try:
                shares = await self.runner.driver.shares(name)
            except CommandFailed as error:
                self.runner.tell(clean(str(error), limit=300), True)
        self.screen.app.push_screen(WeightScreen(self.reader, overview, where, name, shares))


def _is_captured(source: SessionSource, where: Where) -> bool:
    names = source.session.taps
    if where.step not in source.reach(where.branch):
        return False
    place = names[where.tap].name, where.seq
    return any((key.tap, key.seq) == place for key in source.session.captured(where.step, where.branch))
