"""Commands on the workbench: from keys and the `:` line to the debugger, and their answers back to the screen."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.tui.panes import GOLDEN, TITLES
from workbench.tui.reader import Reader
from workbench.tui.screens import commands
from workbench.tui.screens.bench import Bench
from workbench.tui.screens.keymap import Keymap
from workbench.tui.screens.output import OutputScreen
from workbench.tui.screens.replies import AsSheet, AsTensor, shown_as
from workbench.tui.screens.runner import CommandRunner
from workbench.tui.screens.tensor_opener import TensorOpener
from workbench.tui.screens.toggles import Toggled, TogglesScreen, toggle_rows
from workbench.tui.screens.view_actions import ViewActions
from workbench.views.where import Where


class CommandDispatcher:
    """Takes command lines and command keys."""

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
        if quiet and (self.runner.driver.live or reply.outcome.kind != "message"):
            return  # a replay says why it brings nothing
        shown = shown_as(reply, overview.taps)
        if isinstance(shown, AsTensor):
            await self.opener.open_tap(shown.tap)
        elif isinstance(shown, AsSheet):
            self.bench.app.push_screen(OutputScreen(line, shown.text))
        elif shown.text:
            self.bench.tell(shown.text, shown.wrong, keep=not (shown.recorded and self.runner.driver.live))

    async def key(self, name: str) -> None:
        """The key of a command: the command, with what it needs to know."""
        line = next(key.line for key in self.keymap.keys if key.name == name)
        if name == "interrupt":
            self.runner.interrupt()
        elif name == "toggle":
            await self._choose_toggle()
        elif name == "break":
            self.toggle_break(self.bench.place.tap)
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

    async def _choose_toggle(self) -> None:
        """What can be switched on and off; in a replay it can only be read."""
        overview = self.bench.overview
        if overview is not None:
            model = await self.reader.ask(lambda source: source.meta.model)
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
            self.bench.tell(str(problem), True)
            return
        if act is None:
            self.run(line.strip().lstrip(":"))
        elif act.do == "pane":
            await self.bench.show_pane(act.number)
        elif act.do == "export":
            self.actions.exporter.write(act.argument)
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
            self.bench.tell(f"no theme {name!r}: there are {', '.join(known)}", True)

    def complete(self, line: str) -> list[str]:
        """What the command line may become."""
        return commands.complete(line, self.keymap.commands, self.bench.overview, TITLES)
