"""What stands around the panes of the workbench: status, tokens, the model's tree, the inspector, the message line."""

from __future__ import annotations

from collections.abc import AsyncIterator

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widget import Widget

from lockstep.workbench.tui.marks import Marks
from lockstep.workbench.tui.panes.titles import SENTINELS
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.screens.status import status_facts, step_facts
from lockstep.workbench.tui.screens.token_rows import TokenRows
from lockstep.workbench.tui.widgets.divider import Divider
from lockstep.workbench.tui.widgets.inspector import Inspector
from lockstep.workbench.tui.widgets.key_bar import KeyBar
from lockstep.workbench.tui.widgets.message_line import MessageLine
from lockstep.workbench.tui.widgets.model_tree import ModelTree
from lockstep.workbench.tui.widgets.painted import PaintedWidget
from lockstep.workbench.tui.widgets.pane_tabs import PaneTabs
from lockstep.workbench.tui.widgets.status_line import Fact, StatusLine
from lockstep.workbench.views.operations import operations
from lockstep.workbench.views.overview import Overview, Present, present
from lockstep.workbench.views.token_line import TokenLine
from lockstep.workbench.views.where import Where


class Body(Horizontal, PaintedWidget):
    """The model tree, the panes and the inspector beside each other."""


class Frame:
    """Its widgets, which the screen mounts, and what they show of a place."""

    def __init__(self, reader: Reader, token_colour: str) -> None:
        self.reader = reader
        self.present: Present | None = None
        self.status, self.rules = StatusLine(id="status"), StatusLine(id="rules")
        self.tokens = TokenRows(reader, token_colour)
        self.tree, self.inspector = ModelTree(id="tree"), Inspector(id="inspector")
        self.message = MessageLine(id="message")
        self.tabs = PaneTabs(id="tabs")

    def compose(self, panes: Widget, command_line: Widget) -> ComposeResult:
        """The widgets from top to bottom, with the panes in their middle."""
        yield from (self.status, self.rules, self.tokens.strip)
        yield Divider(id="under-tokens")
        yield self.tabs
        with Body(id="body"):
            yield self.tree
            yield panes
            yield self.inspector
        yield self.tokens.timeline
        yield self.message
        yield command_line
        yield KeyBar(id="keys")

    async def show(
        self, overview: Overview, where: Where, state: Fact | None, marks: Marks
    ) -> AsyncIterator[TokenLine]:
        """Read and show a place. Yields the tokens as far as they were read: a long session's come in parts."""
        self.present = await self.reader.ask(present, where)
        status, rules = status_facts(overview, where, self.present, state)
        self.status.show(*status)
        self.rules.show(*rules)
        self.rules.set_class(any(one.role in ("wrong", "alarm") for side in rules for one in side), "-wrong")
        self.tabs.marked = frozenset({SENTINELS}) if self.present and self.present.alarm else frozenset()
        self._show_message()
        if self.present is not None and self.present.damage:
            self.message.report(self.present.damage, True)
        if self.tree.display or self.inspector.display:
            found = await self.reader.ask(operations, where)
            self.tree.update(overview, where, found, marks)
            self.inspector.update(overview, where, found)
        complete = False
        while not complete:
            complete = await self.tokens.read(overview, where)
            self._show_message()
            yield self.tokens.line

    def show_state(self, state: Fact | None) -> None:
        """What the engine does, while nothing else has changed."""
        if state is not None and self.status.right:
            *before, _, branch = self.status.right
            self.status.right = (*before, state, branch)

    def _show_message(self) -> None:
        self.message.show_step(step_facts(self.present), self.tokens.difference)
