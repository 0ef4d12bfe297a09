"""The workbench on a running model: the same screen, and the keys run it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from msgspec import structs
from textual import on, work

from sessions.text import clean
from workbench.debugger.events import RankLostEvent, StepEvent
from workbench.debugger.host.messages import ClosedEvent, CommandAnswer, OutputEvent, ReadyEvent
from workbench.debugger.host.pending import HostError
from workbench.tui.live import Engine, EngineEvent
from workbench.tui.reader import Reader
from workbench.tui.screens import keys
from workbench.tui.screens.toggles import Toggled
from workbench.tui.screens.workbench import WorkbenchScreen
from workbench.tui.widgets.status_line import Fact, StatusLine
from workbench.views.overview import overview
from workbench.views.source import SessionSource
from workbench.views.weight_tensor import RankArrays
from workbench.views.where import Where

#: Seconds after which what runs is said to run.
_SAY_AFTER = 0.2
#: Seconds for which a command is a short one, behind which others may wait, and how many.
_SHORT, _MOST_WAITING = 0.5, 8


class LiveWorkbench(WorkbenchScreen):
    """A session that grows. Commands go to the host, one after another; what it writes is read as always."""

    def __init__(self, engine: Engine, reader: Reader, ready: ReadyEvent) -> None:
        super().__init__(reader)
        self.engine = engine
        self.state = ready.state
        self.host_pid, self.rank_pids = ready.pid, list(ready.rank_pids)
        self.began = 0.0
        self.behind = False  # steps were told of that were not looked at yet
        self._following, self._turn = asyncio.Lock(), asyncio.Lock()
        self._waiting = self._interrupts = 0  # commands that wait their turn; how often ctrl+c was pressed
        engine.listener = self

    def on_mount(self) -> None:
        """Ask what commands there are; run the prefill so that there is something to see."""
        self.set_interval(0.1, self._tick)
        self._prepare()

    @work(group="prepare")
    async def _prepare(self) -> None:
        try:
            self.registry = await self.engine.registry()
        except HostError as error:
            self.tell(str(error), wrong=True)
            return
        if self.state.step < 0:
            await self.send("next")

    def state_fact(self) -> Fact:
        """What the engine does."""
        if self.state.lost:
            return Fact("● rank lost", "wrong")
        if not self.state.live:
            return Fact("○ engine ended", "wrong")
        if self.engine.running is not None and time.monotonic() - self.began > _SAY_AFTER:
            return Fact(f"● {self.engine.running.split()[0]} …", "accent")
        tap = self.state.tap
        if not tap:
            return Fact("● stopped", "text")
        # A pass that stands still in its middle is recorded when it lands: what is shown is the step before.
        flying = self.state.step > self.where.step
        return Fact(
            f"● in step {self.state.step} at {tap}" if flying else f"● at {tap}",
            "accent" if flying else "text",
        )

    async def _tick(self) -> None:
        """Long work shows that it goes on. However fast the engine runs, it is looked at this often: nobody reads
        faster, and the ranks need the processor more."""
        if not self.query("#status"):
            return  # a timer outlives the screen's widgets by a moment when the app quits
        if self.behind:
            await self.follow()
        if self.engine.running is not None and time.monotonic() - self.began > _SAY_AFTER:
            status = self.query_one("#status", StatusLine)
            if status.right:
                status.right = (self.state_fact(), *status.right[1:])
            elapsed = time.monotonic() - self.began
            self.tell(f"{self.engine.running}   {elapsed:.0f} s   ctrl+c interrupts")

    # --- commands ------------------------------------------------------------------------------------

    async def send(self, line: str, *, quiet: bool = False) -> CommandAnswer | None:
        """Have a command carried out and show where that led. None: it failed, and was told why.

        While a short one runs the next may be given: keys are typed faster than steps are run. ctrl+c takes back
        those that wait.
        """
        running = self.engine.running
        if running is not None and (time.monotonic() - self.began > _SHORT or self._waiting >= _MOST_WAITING):
            self.tell(f"{running} is still running: ctrl+c interrupts it")
            return None
        interrupts = self._interrupts
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1  # also where another command takes the place of this one
        try:
            return await self._send(line, quiet) if interrupts == self._interrupts else None
        finally:
            self._turn.release()

    async def _send(self, line: str, quiet: bool) -> CommandAnswer | None:
        self.began = time.monotonic()
        try:
            reply = await self.engine.command(line)
        except HostError as error:
            await self.follow()
            self.tell(clean(str(error), limit=300), wrong=True)
            return None
        self.state = reply.state
        await self.follow()
        if not quiet:
            self.show_reply(line, reply)
        return reply

    async def follow(self) -> None:
        """Read what was written and look at where the debugger stands. One at a time: the last word is the latest."""
        async with self._following:
            self.behind = False
            await self._follow()

    async def _follow(self) -> None:
        await self.reader.ask(SessionSource.refresh)
        self.overview = await self.reader.ask(overview)
        branch = self.state.branch
        steps = await self.reader.ask(lambda source: source.session.steps(branch))
        step = min(max(self.state.step, 0), max(0, steps.stop - 1))
        taps = self.overview.taps
        tap = self.state.tap
        index = taps.index(tap) if tap in taps else self.where.tap
        where = replace(self.where, branch=branch, step=step, tap=index)
        if where == self.where:
            self.watch_where()  # the same place, but more is known of it
        else:
            self.where = where
        if not self.current_pane:
            await self.show_pane(self.pane)

    @on(EngineEvent)
    async def _heard(self, event: EngineEvent) -> None:
        """What the host tells while a command runs."""
        event.stop()
        match event.event:
            case StepEvent(branch=branch, step=step):
                if self.engine.running is not None:  # else the answer is here already, and knows better
                    self.state = structs.replace(self.state, branch=branch, step=step)
                    self.behind = True
            case OutputEvent(text=text):
                self.tell(clean(text, limit=300))
            case RankLostEvent(message=message):
                self.state = structs.replace(self.state, lost=message or "a rank was lost")
                told = clean(message, limit=300)
                self.tell(f"{told}   the session is kept; :restart starts the ranks again", wrong=True)
            case ClosedEvent(message=message):
                self.state = structs.replace(self.state, live=False)
                told = clean(message or "the engine has ended", limit=300)
                self.tell(f"{told}; the session is kept and can still be looked at", wrong=True)

    # --- keys ----------------------------------------------------------------------------------------

    async def move(self, kind: str, by: int, times: int = 1) -> None:
        """n N s S i I c C f: the debugger's own commands."""
        key = next(k for k in keys.KEYS if k.action == f"move('{kind}', {by})")
        self.run_command(key.command if times == 1 else f"{key.command} {times}")

    async def carry_out(self, line: str, quiet: bool) -> None:
        """The host does it."""
        await self.send(line, quiet=quiet)

    async def action_interrupt(self) -> None:
        """ctrl+c: stop what runs, at an operation boundary."""
        if self.engine.running is None:
            self.tell("nothing runs; ctrl+q quits")
        else:
            self._interrupts += 1
            self.engine.interrupt()
            self.tell(f"interrupting {self.engine.running} …")

    async def action_golden(self) -> None:
        """g: compare, then show the verdicts."""
        await self.show_pane(7)
        self.run_command("golden")

    def why_no_toggle(self) -> str:
        """Why nothing can be switched now."""
        return "a rank was lost: :restart first" if self.state.lost else ""

    def toggled(self, chosen: Toggled | None) -> None:
        """Switch it: the debugger forks a branch."""
        if chosen is not None:
            self.run_command(f"toggle {chosen.rule} {chosen.value}")

    def open_tensor(self, tap: int) -> None:
        """Capture the tensor first if the session does not have it yet."""
        self._open_tensor_of(tap)

    @work(group="command", exclusive=True)
    async def _open_tensor_of(self, tap: int) -> None:
        where = replace(self.where, tap=tap)
        captured = await self.reader.ask(_is_captured, where)
        assert self.overview is not None
        if not captured and self.engine.running is None and self.state.live:
            await self.send(f"print {self.overview.taps[tap]}", quiet=True)
        WorkbenchScreen.open_tensor(self, tap)

    async def held(self, name: str) -> RankArrays:
        """The ranks' own shares, unless they are at work."""
        if self.engine.running is not None or not self.state.live:
            return {}
        try:
            return await self.engine.weight(name)
        except HostError as error:
            self.tell(clean(str(error), limit=300), wrong=True)
            return {}

    def on_unmount(self) -> None:
        """The host and its ranks end with the screen."""
        self.engine.close()


def _is_captured(source: SessionSource, where: Where) -> bool:
    names = source.session.taps
    if where.step not in source.session.steps(where.branch):
        return False
    return any(key.tap == names[where.tap].name for key in source.session.captured(where.step, where.branch))
