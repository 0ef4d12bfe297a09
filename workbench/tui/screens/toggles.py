"""The toggles: known bugs by group, what each does, what switching costs, why it cannot act here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.catalogue import DEFAULTS, FAULTS
from lockstep.engine.faults.fault import Fault
from lockstep.workbench.tui.screens.dialog import Dialog
from lockstep.workbench.tui.widgets.field import Field
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine

_COSTS = {"step": "next step", "build": "empties the cache", "load": "reads weights again"}


@dataclass(frozen=True, slots=True)
class Toggled:
    """What was chosen: set `rule` to `value`."""

    rule: str
    value: str


@dataclass(frozen=True, slots=True)
class ToggleRow:
    """A line of the list: a group's heading, or a fault, whether it is on, and why it cannot act."""

    fault: Fault | None
    heading: str = ""
    on: bool = False
    why_not: str = ""


def toggle_rows(model: ModelConfig, tp: int, rules: Mapping[str, str]) -> list[ToggleRow]:
    """The catalogue for a model (see `views.model_config`) under the rules in force."""
    rows: list[ToggleRow] = []
    for group, faults in groupby(sorted(FAULTS, key=lambda f: _ORDER.index(f.group)), key=lambda f: f.group):
        rows.append(ToggleRow(None, group))
        rows += [
            ToggleRow(f, "", rules.get(f.seam, DEFAULTS[f.seam]) == f.value, _why_not(f, model, tp))
            for f in faults
        ]
    return rows


_ORDER = list(dict.fromkeys(fault.group for fault in FAULTS))


def _why_not(fault: Fault, model: ModelConfig, tp: int) -> str:
    try:
        return fault.needs(model, tp) or ""
    except AttributeError:  # the model's files are gone, and the session does not have that of it
        return ""


class TogglesScreen(Dialog[Toggled | None]):
    """Choose a fault to switch on or off. `why_not` greys all of them: a replay."""

    CSS_PATH = "../styles/toggles.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close"),
        Binding("q,x", "close", "Close"),
        Binding("space", "switch", "Switch"),
        Binding("slash", "filter", "Filter"),
    ]

    def __init__(self, rows: list[ToggleRow], why_not: str = "") -> None:
        super().__init__()
        self._all, self._rows, self._why_not = rows, rows, why_not

    def compose(self) -> ComposeResult:
        """The list, and the fault under the cursor in full."""
        with Vertical(id="toggles") as box:
            box.border_title = "toggles"
            box.border_subtitle = "enter switches   / filters   esc closes"
            yield Field(placeholder="filter: words of a fault, e.g. bias or rope", compact=True)
            yield Grid(_COLUMNS, id="faults")
            yield TextBlock(fold=True, id="fault")

    def on_mount(self) -> None:
        """Stand on the first fault."""
        self._list()
        grid = self.query_one(Grid)
        grid.cursor = next((i for i, row in enumerate(self._rows) if row.on), 1)
        grid.focus()
        self._describe()

    def _list(self) -> None:
        headings = {i for i, row in enumerate(self._rows) if row.fault is None}
        self.query_one(Grid).show(len(self._rows), self._cells, passed=headings)

    def _cells(self, index: int) -> list[GridCell]:
        row = self._rows[index]
        if row.fault is None:
            return [("", "quiet"), (row.heading, "strong"), ("", "quiet"), ("", "quiet")]
        greyed = bool(row.why_not or self._why_not)
        role = "wrong" if row.on else "faint" if greyed else "text"
        cost = row.why_not or _COSTS[row.fault.level]
        return [
            ("●" if row.on else "○", "wrong" if row.on else "faint"),
            (f"  {row.fault.title}", role),
            (f"{row.fault.seam}={row.fault.value}", role if row.on or greyed else "quiet"),
            (cost, "faint" if greyed else "quiet"),
        ]

    def _describe(self) -> None:
        row = self._rows[self.query_one(Grid).cursor] if self._rows else ToggleRow(None)
        if row.fault is None:
            reported = "" if self._rows else "No fault has these words: esc shows all."
            self.query_one(TextBlock).show([[(reported, "quiet")]])
            return
        fault = row.fault
        why = row.why_not or self._why_not
        lines: list[TextLine] = [
            [(fault.title, "strong")],
            [(fault.symptom, "text")],
            [
                ("shows first at ", "quiet"),
                (fault.first_tap, "text"),
                (f"   seen in {fault.source}" if fault.source else "", "quiet"),
            ],
            [("cannot act: ", "wrong"), (why, "text")]
            if why
            else [("costs: ", "quiet"), (_COSTS[fault.level], "text")],
        ]
        self.query_one(TextBlock).show(lines)

    @on(Grid.Pointed)
    def _pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self._describe()

    @on(Grid.Chosen)
    def _chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        self.action_switch()

    def action_switch(self) -> None:
        """Switch the fault under the cursor."""
        row = self._rows[self.query_one(Grid).cursor] if self._rows else ToggleRow(None)
        if row.fault is None or row.why_not or self._why_not:
            self.app.bell()
            return
        value = DEFAULTS[row.fault.seam] if row.on else row.fault.value
        self.dismiss(Toggled(row.fault.seam, value))

    def action_filter(self) -> None:
        """Type words of a fault."""
        field = self.query_one(Field)
        field.add_class("-open")
        self.set_focus(field)  # at once, for the keys that are under way

    @on(Field.Changed)
    def _filtered(self, event: Field.Changed) -> None:
        """The faults that have every word in what is reported of them, under their groups."""
        event.stop()
        self._rows = filtered_rows(self._all, event.value)
        self._list()
        self.query_one(Grid).cursor = next(
            (i for i, row in enumerate(self._rows) if row.fault is not None), 0
        )
        self._describe()

    @on(Field.Submitted)
    def _entered(self, event: Field.Submitted) -> None:
        """The keys go back to the list."""
        event.stop()
        self.query_one(Grid).focus()

    def action_leave(self) -> None:
        """Show all of them again; where that is so already, switch nothing."""
        field = self.query_one(Field)
        if not field.has_class("-open"):
            self.action_close()
            return
        field.value = ""
        field.remove_class("-open")
        self.query_one(Grid).focus()

    def action_close(self) -> None:
        """Switch nothing."""
        self.dismiss(None)


def filtered_rows(rows: Sequence[ToggleRow], words: str) -> list[ToggleRow]:
    """The faults that have every word in their title, symptom, name or group, with the headings of their groups."""
    wanted, found, heading = words.casefold().split(), [], None
    for row in rows:
        if row.fault is None:
            heading = row
            continue
        fault = row.fault
        text = f"{fault.title} {fault.symptom} {fault.seam}={fault.value} {fault.group} {fault.first_tap}".casefold()
        if all(word in text for word in wanted):
            found += [row] if heading is None else [heading, row]
            heading = None
    return found


_COLUMNS = (
    GridColumn("", 1),
    GridColumn("known bug", 30, flex=2),
    GridColumn("fault", 22, flex=1),
    GridColumn("costs, or why it cannot act", 20, flex=1, drop=1),
)
