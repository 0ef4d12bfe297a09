"""From a tap or a parameter to the pane that shows its values, and back."""

from __future__ import annotations

from dataclasses import replace

from lockstep.sessions.text import clean
from lockstep.workbench.tui.drivers.port import CommandFailed
from lockstep.workbench.tui.panes.titles import TENSOR
from lockstep.workbench.tui.screens.bench import Bench
from lockstep.workbench.tui.screens.runner import CommandRunner
from lockstep.workbench.views.tensor_look import HeldParameter
from lockstep.workbench.views.where import Where

#: The most elements of a parameter that the ranks are asked to send.
_SENT = 8_000_000


class TensorOpener:
    """Opens tensors on a workbench; a running model is asked for what the session does not have."""

    def __init__(self, bench: Bench, runner: CommandRunner) -> None:
        self.bench, self.runner = bench, runner

    async def open_tap(self, tap: int) -> None:
        """The tensor of the tap at the place that is looked at."""
        if tap != self.bench.place.tap:
            self.bench.look(replace(self.bench.place, tap=tap))
        await self._show(None)

    async def open_weight(self, name: str, size: int) -> None:
        """A parameter of `size` elements."""
        parameter = HeldParameter(name)
        if size <= _SENT:
            try:
                parameter = HeldParameter(name, await self.runner.driver.shares(name))
            except CommandFailed as error:
                self.runner.report(clean(str(error), newlines=True), True)
        await self._show(parameter)

    async def _show(self, parameter: HeldParameter | None) -> None:
        await self.bench.show_pane(TENSOR)
        from lockstep.workbench.tui.panes.tensor import (
            TensorPane,  # here: the first picture waits for no pane but one
        )

        if isinstance(self.bench.front, TensorPane):
            self.bench.front.parameter = parameter
            self.bench.front.again()

    def how_to_bring(self, where: Where) -> str:
        """The command that brings the tensor at `where`; "" where none can: only where the debugger stands can the
        operations be run again."""
        driver, overview = self.runner.driver, self.bench.overview
        idle = driver.live and driver.running is None and not driver.why_idle
        at = driver.at
        if overview is None or not idle or at is None or (at.branch, at.step) != (where.branch, where.step):
            return ""
        return f"print {overview.taps[where.tap]}" + (f" seq {where.seq}" if where.seq else "")
