"""What the split view has the debugger do: step both sides, run a side's step again for a tensor that it lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.screens.bench import Bench
from lockstep.workbench.tui.screens.replies import AsMessage, shown_as
from lockstep.workbench.tui.screens.runner import CommandRunner
from lockstep.workbench.views.compared_tensors import ComparedTensor
from lockstep.workbench.views.sides import GOLDEN, Other
from lockstep.workbench.views.where import Where


class SideCommands:
    """Commands on both sides, one after another. What they answer goes to the runner's `report`."""

    def __init__(self, bench: Bench, reader: Reader, runner: CommandRunner) -> None:
        self.bench, self.reader, self.runner = bench, reader, runner
        self._turn = asyncio.Lock()
        self._interrupts = 0

    @property
    def idle(self) -> bool:
        """Whether no engine can run anything: the view can only look."""
        driver = self.runner.driver
        return not driver.live or bool(driver.why_idle) or driver.at is None

    async def in_turn(self, act: Callable[[], Awaitable[None]]) -> None:
        """Carry out what a key asks for once what was asked before is done; an interrupt takes it back."""
        interrupts = self._interrupts
        async with self._turn:
            if interrupts == self._interrupts:
                await act()

    def interrupt(self) -> None:
        """Stop what runs, and forget what waits."""
        self._interrupts += 1
        self.runner.interrupt()

    async def step(self, where: Where, other: Other, by: int) -> Where:
        """Have the debugger step our side, and the other one run on as far; the place that this led to."""
        for line in self._lines(where, by):
            if not await self._run(line):
                return where
        at = self.bench.place
        there = replace(where, step=at.step) if at.branch == where.branch else where
        if by > 0 and other != GOLDEN:
            steps = await self.reader.ask(lambda source: source.session.steps(int(other)))
            lacks = there.step - steps.stop + 1
            if lacks > 0:
                await self._run(f"extend {other} {lacks}")
        return there

    def _lines(self, where: Where, by: int) -> list[str]:
        at = self.runner.driver.at
        assert at is not None
        if (at.branch, at.step) == (where.branch, where.step):
            return ["next" if by > 0 else "reverse-next"]
        return [f"branch {where.branch}"] * (at.branch != where.branch) + [f"goto {max(0, where.step + by)}"]

    async def _run(self, line: str) -> bool:
        """Carry out a line and report what it answered; False where it was not carried out."""
        reply = await self.runner.run(line)
        if reply is not None and self.bench.overview is not None:
            shown = shown_as(reply, self.bench.overview.taps)
            self.runner.report(shown.text if isinstance(shown, AsMessage) else "", False)
        return reply is not None

    async def fill(self, line: str) -> None:
        """A command that brings what is missing; a replay states why it cannot."""
        reply = await self.runner.run(line)
        if reply is not None and not self.runner.driver.live:
            self.runner.report(reply.text.strip().partition("\n")[0], False)

    async def fetch(self, found: ComparedTensor, where: Where, other: Other) -> None:
        """Have an engine that is idle compute again what a branch did not capture."""
        if self.idle or self.runner.driver.running is not None:
            return
        sides = dict(zip(found.names, (where.branch, other), strict=True))
        for name in found.lacking:
            if sides[name] != GOLDEN:
                await self.fill(f"print {found.tap} seq {where.seq} step {where.step} branch {sides[name]}")
