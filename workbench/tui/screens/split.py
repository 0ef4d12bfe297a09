"""Two branches, or a branch and its golden reference, beside each other; one key steps both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container
from textual.screen import Screen

from lockstep.sessions.errors import SessionError
from lockstep.workbench.tui import screenshots
from lockstep.workbench.tui.guard import Guarded
from lockstep.workbench.tui.keys import shown
from lockstep.workbench.tui.marks import Marks
from lockstep.workbench.tui.navigator import clamped, layer_beside, operation_beside, same_operation
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.screens.bench import Bench
from lockstep.workbench.tui.screens.exporter import Exporter
from lockstep.workbench.tui.screens.help import HelpScreen
from lockstep.workbench.tui.screens.runner import CommandRunner
from lockstep.workbench.tui.screens.side_commands import SideCommands
from lockstep.workbench.tui.screenshots import Screenshot
from lockstep.workbench.tui.split import OPERATIONS, PARTS, TENSOR
from lockstep.workbench.tui.split.header import SplitHeader
from lockstep.workbench.tui.split.keys import BINDINGS, FILL, HINTS, KEYS, OTHER_SIDE, PINNED
from lockstep.workbench.tui.split.message import SplitMessage
from lockstep.workbench.tui.split.operations import SplitOperations
from lockstep.workbench.tui.split.part import SplitPart
from lockstep.workbench.tui.widgets.divider import Divider
from lockstep.workbench.tui.widgets.key_bar import KeyBar
from lockstep.workbench.tui.widgets.pane_tabs import PaneTabs
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.tui.widgets.token_strip import TokenStrip
from lockstep.workbench.views.compared_tensors import compared_tensor
from lockstep.workbench.views.overview import Overview
from lockstep.workbench.views.sides import GOLDEN, Other, SidesReader, SidesTokens, last_step, other_sides
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where


class SplitScreen(Guarded, Screen[Where | None]):
    """Looks at the branch of a place beside `other`; closes with the place to look at where it went elsewhere."""

    CSS_PATH = "../styles/split.tcss"
    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    def __init__(
        self, bench: Bench, reader: Reader, runner: CommandRunner, other: Other, part: int = OPERATIONS
    ) -> None:
        super().__init__()
        self.bench, self.reader, self.runner = bench, reader, runner
        self.where, self.other = bench.place, other
        self.tokens: SidesTokens | None = None
        self.operations = SplitOperations(reader)
        self.parts: Sequence[SplitPart] = [self.operations, *(made(reader) for made in PARTS[1:])]
        self.active = part
        self.head = SplitHeader()
        self.commands = SideCommands(bench, reader, runner)
        self.exporter = Exporter(self, self._picture, lambda: self.front.table(), self._report)
        self._sides = SidesReader()
        self._strayed = False  # whether it looks elsewhere than the workbench
        self._opening = True
        self._report_before = runner.report

    def compose(self) -> ComposeResult:
        """Title, both strips with the arrow under them, the parts, a message line, the keys."""
        yield self.head
        yield Divider()
        yield PaneTabs(id="tabs")
        yield Container(*self.parts, id="parts")
        yield SplitMessage(id="message")
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Hear what the commands report, and look."""
        self.runner.report = self._report
        tabs = self.query_one(PaneTabs)
        tabs.titles, tabs.short_titles = (
            tuple(p.TITLE for p in PARTS),
            tuple(p.SHORT or p.TITLE for p in PARTS),
        )
        for part in self.parts:
            part.live = self.runner.driver.live
        self.set_interval(0.1, self._tick)
        self._bring(self.active)

    def on_unmount(self) -> None:
        """The workbench hears the commands again."""
        self.runner.report = self._report_before

    @property
    def overview(self) -> Overview:
        """The session."""
        assert self.bench.overview is not None, "the workbench opens this only when it has read the session"
        return self.bench.overview

    @property
    def front(self) -> SplitPart:
        """The part that is shown."""
        return self.parts[self.active - 1]

    @property
    def names(self) -> tuple[str, str]:
        """What the sides are called."""
        ours = self.overview.branch(self.where.branch).name
        return ours, GOLDEN if self.other == GOLDEN else self.overview.branch(int(self.other)).name

    # --- what is shown -------------------------------------------------------------------------------

    def _bring(self, number: int) -> None:
        """A part to the front."""
        self.active = self.query_one(PaneTabs).active = number
        for i, part in enumerate(self.parts, 1):
            part.display = i == number
        own = [*self.front.HINTS, *((FILL,) if self.front.live else ())]
        self.query_one(KeyBar).show([*HINTS, *own, OTHER_SIDE], PINNED)
        self.front.focus_content()
        self._show()

    @work(exclusive=True, group="show")
    async def _show(self) -> None:
        """Read the tokens, a little at a time, and have the part look as soon as they have come to the step."""
        looked, complete = False, False
        try:
            self.where = await self.reader.ask(SessionSource.passed, self.where)
            while not complete:
                tokens = await self.reader.ask(self._sides.tokens, self.where, self.other)
                self.tokens, complete = tokens, tokens.complete
                self._show_tokens(tokens)
                if not looked and (complete or tokens.covers(self.where.step)):
                    looked = True
                    await self._open_at_what_both_have(tokens)
                    part = self.front
                    part.other, part.names, part.parted = self.other, self.names, tokens.parted
                    part.line = tokens.pair.ours
                    part.look(self.overview, self.where, Marks())
        except SessionError as error:
            self._report(str(error), True)

    async def _open_at_what_both_have(self, tokens: SidesTokens) -> None:
        """Where the other side ends before the present step, the screen opens at the last one that can be compared."""
        if not self._opening:
            return
        self._opening = False
        end = await self.reader.ask(last_step, self.where, self.other)
        if 0 <= end < self.where.step:
            step = end if tokens.parted is None else min(end, tokens.parted)
            self.where = replace(self.where, step=step)
            self._show_tokens(tokens)
            self._report(f"{self.names[1]} ends at step {end}: step {step} is the last to compare")

    def _show_tokens(self, tokens: SidesTokens) -> None:
        state = self.runner.driver.state(self.where, self.runner.busy) or Fact("replay", "quiet", drop=1)
        sequence = Fact(self.overview.batch.label(self.where.seq), "text", drop=1)
        self.head.show(tokens, self.where.step, self.names, (sequence, state), golden=self.other == GOLDEN)

    def _report(self, text: str, wrong: bool = False) -> None:
        self.query_one(SplitMessage).report(text, wrong)

    def _tick(self) -> None:
        if self.is_current:
            self.query_one(SplitMessage).progress(self.runner.progress if self.runner.busy else "")

    # --- where ---------------------------------------------------------------------------------------

    def _look(self, where: Where) -> None:
        self._strayed |= (where.step, where.seq) != (self.where.step, self.where.seq)
        self.where = where
        self._report("")
        self._show()

    async def action_scrub(self, by: int) -> None:
        """Another step on both sides."""
        steps = await self.reader.ask(lambda source: source.session.steps(self.where.branch))
        there = clamped(replace(self.where, step=self.where.step + by), steps)
        if there == self.where:
            self._report(f"{self.names[0]} has no step {self.where.step + by}")
        else:
            self._look(there)

    def action_neighbour(self, by: int) -> None:
        """The same operation of a neighbouring layer."""
        self._look(same_operation(self.overview.taps, self.where, by))

    def action_within(self, what: str, by: int) -> None:
        """The next "operation" or "layer" of the step on both sides, or the one before."""
        beside = operation_beside if what == "operation" else layer_beside
        there = beside(self.overview.taps, self.where, by)
        if there == self.where:
            self._report(
                f"no {what} {'follows in' if by > 0 else 'before this one in'} step {self.where.step}"
            )
        else:
            self._look(there)
            self._report(f"at {self.overview.taps[there.tap]}")

    def on_key(self, event: events.Key) -> None:
        """A key that nothing took."""
        if event.is_printable:
            self._report(
                f"{shown(event.key)} does nothing here: ? shows the keys, esc goes back to the workbench"
            )

    def action_parting(self) -> None:
        """The step of the first different token."""
        if self.tokens is None or self.tokens.parted is None:
            self._report("the tokens are the same as far as both go")
        else:
            self._look(replace(self.where, step=self.tokens.parted))

    async def action_other(self) -> None:
        """The next other side."""
        found = [side.other for side in await self.reader.ask(other_sides, self.where.branch)]
        if len(found) < 2:
            self._report("there is no other side to choose")
            return
        self.other = found[(found.index(self.other) + 1) % len(found)] if self.other in found else found[0]
        self._look(self.where)

    async def action_go(self, by: int) -> None:
        """Step both; in a replay, and where no engine runs, only look."""
        if self.commands.idle:
            await self.action_scrub(by)
        else:
            self.run_worker(self.commands.in_turn(lambda: self._step_both(by)), group="command")

    async def _step_both(self, by: int) -> None:
        self.where, self._strayed = await self.commands.step(self.where, self.other, by), False
        self._show()

    # --- parts ---------------------------------------------------------------------------------------

    def action_part(self, number: int) -> None:
        """Bring a part to the front; the tensor that of the operation under the cursor."""
        row = self.operations.chosen if self.active == OPERATIONS else None
        if number == TENSOR and row is not None:
            self.post_message(Pane.OpenTensor(row.tap))
        else:
            self._bring(number)

    @on(PaneTabs.Picked)
    def _tab(self, event: PaneTabs.Picked) -> None:
        self.action_part(event.number)

    @on(TokenStrip.Picked)
    def _token(self, event: TokenStrip.Picked) -> None:
        if event.step is not None:
            self._look(replace(self.where, step=event.step))

    @on(Pane.Go)
    def _go_to(self, event: Pane.Go) -> None:
        self.where = event.applied_to(self.where)

    @on(Pane.OpenTensor)
    def _open_tensor(self, event: Pane.OpenTensor) -> None:
        self.where = replace(self.where, tap=event.tap)
        self.run_worker(self.commands.in_turn(self._open), group="command")

    async def _open(self) -> None:
        """The tensor of the tap; a running model is asked for what a side lacks."""
        if self.tokens is not None:
            found = await self.reader.ask(compared_tensor, self.where, self.other, self.tokens.parted)
            await self.commands.fetch(found, self.where, self.other)
        self._bring(TENSOR)

    def action_fill(self) -> None:
        """Have what a side lacks computed again."""
        self.front.action_fill()

    @on(Pane.Command)
    def _command(self, event: Pane.Command) -> None:
        self.run_worker(self.commands.in_turn(lambda: self._fill(event.line)), group="command")

    async def _fill(self, line: str) -> None:
        await self.commands.fill(line)
        self._show()

    # --- the rest ------------------------------------------------------------------------------------

    def action_sequence(self, by: int) -> None:
        """Another sequence of a batch."""
        self._look(replace(self.where, seq=self.overview.batch.beside(self.where.seq, by)))

    def action_interrupt(self) -> None:
        """Stop what runs."""
        self.commands.interrupt()

    def action_close(self) -> None:
        """Back to the workbench, at the step that is looked at."""
        self.dismiss(self.where if self._strayed else None)

    def action_help(self) -> None:
        """What the part shows, and the keys."""
        self.app.push_screen(HelpScreen(f"{self.active}  {self.front.TITLE}", self.front.HELP, KEYS))

    def action_copy(self) -> None:
        """The part's data to the clipboard."""
        self.exporter.copy()

    def action_export(self) -> None:
        """The part to a file."""
        self.exporter.ask()

    def _picture(self) -> tuple[Screenshot, str] | None:
        title, stem = self.front.named(self.overview.model)
        return screenshots.taken(self, self.query_one("#parts").region, title, self.front.table()), stem

    def on_key_bar_pressed(self, event: KeyBar.Pressed) -> None:
        """A clicked hint is its key."""
        self.app.simulate_key(event.hint.press)
