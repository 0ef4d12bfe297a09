"""Commands on the workbench: from keys and the `:` line to the debugger, and their answers back to the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.workbench.judgements.golden_event import compared_by
from lockstep.workbench.tui.panes.titles import GOLDEN, TITLES
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.screens import commands
from lockstep.workbench.tui.screens.bench import Bench
from lockstep.workbench.tui.screens.keymap import Keymap
from lockstep.workbench.tui.screens.output import OutputScreen
from lockstep.workbench.tui.screens.replies import AsMessage, AsSheet, AsTensor, shown_as
from lockstep.workbench.tui.screens.runner import CommandRunner
from lockstep.workbench.tui.screens.tensor_opener import TensorOpener
from lockstep.workbench.tui.screens.view_actions import ViewActions
from lockstep.workbench.views.sides import Other, other_sides, usual_side
from lockstep.workbench.views.where import Where

if TYPE_CHECKING:
    from lockstep.workbench.tui.screens.toggles import Toggled


class CommandDispatcher:
    """Takes command lines and command keys. A screen is imported when it is opened: the first paint waits for none."""

    def __init__(
        self, bench: Bench, reader: Reader, runner: CommandRunner, keymap: Keymap, actions: ViewActions
    ) -> None:
        self.bench, self.reader, self.runner, self.keymap = bench, reader, runner, keymap
        self.actions = actions
        self.opener = TensorOpener(bench, runner)

    def run(self, line: str, *, quiet: bool = False) -> None:
        """Have the debugger carry out a line; `quiet`: what it answers is seen in the pane."""
        self.bench.screen.run_worker(self._carry_out(line, quiet), group="command")

    def go(self, there: Where, *, inside: bool) -> None:
        """Have the debugger go to the end of a step, or to a tap inside it."""
        at, overview = self.runner.driver.at, self.bench.overview
        if at is None or overview is None:
            return
        tap = f" {overview.taps[there.tap]}" if inside and there.tap < len(overview.taps) else ""
        lines = [f"branch {there.branch}"] * (there.branch != at.branch) + [f"goto {there.step}{tap}"]
        self.bench.screen.run_worker(self._carry_out_all(lines), group="command")

    async def _carry_out_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            await self._carry_out(line, False)

    async def _carry_out(self, line: str, quiet: bool) -> None:
        reply = await self.runner.run(line)
        overview = self.bench.overview
        if reply is None or overview is None:
            return
        shown = shown_as(reply, overview.taps)
        if quiet and not isinstance(shown, AsMessage):  # the pane shows it; that it came is reported
            shown = AsMessage(shown.text.splitlines()[0] if isinstance(shown, AsSheet) else "")
        if isinstance(shown, AsTensor):
            await self.opener.open_tap(shown.tap)
        elif isinstance(shown, AsSheet):
            self.bench.app.push_screen(OutputScreen(line, shown.text, prose=line.split()[0] in ("help", "h")))
        elif shown.text:
            keep = not (shown.recorded and self.runner.driver.live)
            self.bench.report(shown.text, shown.wrong, keep, finding=True)

    async def key(self, name: str) -> None:
        """The key of a command: the command, with what it needs to know."""
        line = next(key.line for key in self.keymap.keys if key.name == name)
        if name == "interrupt":
            self.runner.interrupt()
        elif name == "toggle":
            await self._choose_toggle()
        elif name == "break":
            self.toggle_break(self.bench.place.tap)
        elif name == "split":
            await self.split()
        elif name == "golden":
            await self.bench.show_pane(GOLDEN)
            if self.runner.driver.live:
                self.run(line)
        else:
            self.run(line)

    def toggle_break(self, tap: int) -> None:
        """Put a breakpoint at an operation, or take away what stops there and nowhere else."""
        taps = self.bench.overview.taps if self.bench.overview is not None else ()
        at = self.runner.driver.at
        if tap < len(taps):
            there = [one for one in (at.breakpoints if at else ()) if list(one.places) == [tap]]
            self.run(f"delete {there[-1].id}" if there else f"break {taps[tap]}")

    async def split(self, name: str = "") -> None:
        """The branch beside another one, or beside golden: the one of that name, the one whose tokens are beside it
        already, the usual one; else that is asked."""
        bench = self.bench
        if bench.overview is None:
            return
        place = bench.place
        found = await self.reader.ask(other_sides, place.branch)
        shown = self.actions.tokens.against(bench.overview, place)
        usual = await self.reader.ask(usual_side, place.branch)
        if not found:
            begin = "x forks another, g records a golden reference"
            if bench.overview.engine:
                begin = f"{compared_by(bench.overview.name)} records a golden reference"
            bench.report(f"there is nothing to put beside this branch: {begin}")
        elif name:
            named = next((side.other for side in found if name in (side.name, str(side.other))), None)
            if named is None:
                there = ", ".join(side.name for side in found)
                bench.report(f"there is no {name!r} to put beside this branch: there are {there}", True)
            else:
                self._open_split(named)
        elif any(side.other == shown for side in found):
            self._open_split(shown)
        elif usual is not None:
            self._open_split(usual)
        else:
            from lockstep.workbench.tui.screens.side_chooser import SideChooser

            title = f"{bench.overview.branch(place.branch).name} beside"
            bench.app.push_screen(SideChooser(title, found), self._open_split)

    def _open_split(self, other: Other | None) -> None:
        if other is None or self.bench.front is None:
            return
        from lockstep.workbench.tui.screens.split import SplitScreen
        from lockstep.workbench.tui.split import OPERATIONS, PART_OF_PANE

        part = PART_OF_PANE.get(self.bench.front.NUMBER, OPERATIONS)

        def closed(where: Where | None) -> None:
            if where is not None:
                self.bench.look(where)

        self.bench.app.push_screen(SplitScreen(self.bench, self.reader, self.runner, other, part), closed)

    async def _choose_toggle(self) -> None:
        """What can be switched on and off; in a replay it can only be read."""
        from lockstep.workbench.tui.screens.toggles import TogglesScreen, toggle_rows
        from lockstep.workbench.views.model_config import model_config

        overview = self.bench.overview
        if overview is not None:
            model = await self.reader.ask(model_config)
            rules = dict(overview.branch(self.bench.place.branch).rules)
            rows = toggle_rows(model, overview.ranks, rules)
            self.bench.app.push_screen(TogglesScreen(rows, self.runner.driver.why_no_toggle), self._toggled)

    def _toggled(self, chosen: Toggled | None) -> None:
        if chosen is not None:
            self.run(f"toggle {chosen.rule} {chosen.value}")

    async def enter(self, line: str) -> None:
        """A line of the `:` line: the screen's own, else the debugger's."""
        try:
            act = commands.parse_own(line, TITLES)
        except commands.CommandProblem as problem:
            self.bench.report(str(problem), True)
            return
        if act is None:
            self.run(line.strip().lstrip(":"))
        elif act.do == "pane":
            await self.bench.show_pane(act.number)
        elif act.do == "export":
            self.actions.exporter.write(act.argument)
        elif act.do == "split":
            await self.split(act.argument)
        elif act.do == "theme":
            self._theme(act.argument)
        elif act.do == "help":
            self.actions.help()
        else:
            self.bench.app.exit(0)

    def _theme(self, name: str) -> None:
        known = sorted(self.bench.app.available_themes)
        found = [theme for theme in known if name in theme]
        if found:
            self.bench.app.theme = found[0]
        else:
            self.bench.report(f"no theme {name!r}: there are {', '.join(known)}", True)

    def complete(self, line: str) -> list[str]:
        """What the command line may become."""
        return commands.complete(line, self.keymap.commands, self.bench.overview, TITLES)
