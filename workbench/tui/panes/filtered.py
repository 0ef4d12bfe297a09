"""Panes with a table that a typed part of a name filters."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.widgets import Input

from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.widgets.field import Field
from lockstep.workbench.tui.widgets.grid import Grid


class FilteredPane(Pane):
    """A field that `/` opens over the grid; `filtered` follows what is typed into it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter"),
        Binding("escape", "clear_filter", "Everything", show=False),
    ]
    DEFAULT_CSS = """
    FilteredPane > Input { height: 1; border: none; padding: 0 1; display: none; background: $raised; }
    FilteredPane > Input.-open { display: block; }
    """

    def filtered(self) -> None:
        """Show what has the needle in its name."""
        raise NotImplementedError

    @staticmethod
    def filter_field(example: str) -> Input:
        """The field, for the content of the pane."""
        return Field(placeholder=f"filter: part of a name, e.g. {example}", compact=True)

    @property
    def needle(self) -> str:
        """What is typed, in small letters; "" lets everything through."""
        return self.query_one(Input).value.strip().lower()

    def action_filter(self) -> None:
        """Type to filter."""
        field = self.query_one(Input)
        field.add_class("-open")
        self.screen.set_focus(field)  # at once, for the keys that are under way

    def action_clear_filter(self) -> None:
        """Everything again."""
        field = self.query_one(Input)
        field.value = ""
        field.remove_class("-open")
        self.query_one(Grid).focus()

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        self.filtered()

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if not event.value:
            self.query_one(Input).remove_class("-open")
        self.query_one(Grid).focus()
