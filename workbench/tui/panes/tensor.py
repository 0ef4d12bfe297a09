"""Pane 9: one tensor, of an operation or a parameter: its values as a map, the one under the cursor, its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from textual import events, on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.reactive import reactive
from textual.widget import Widget

from lockstep.workbench.export.colormap import Scale
from lockstep.workbench.export.table import Table
from lockstep.workbench.paths import file_stem
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.panes.tensor_text import (
    SIDE,
    figure_lines,
    number_lines,
    place_words,
    pointed_lines,
    sheet_axes,
    strongest_lines,
    title_lines,
)
from lockstep.workbench.tui.panes.titles import TENSOR, titled
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.shading import Matrix
from lockstep.workbench.tui.widgets.text_block import TextBlock, wrapped
from lockstep.workbench.views.sheet import Coordinates
from lockstep.workbench.views.tensor import DIFFERENCE
from lockstep.workbench.views.tensor_look import HeldParameter, TensorLook, tensor_look
from lockstep.workbench.views.where import Where

#: From so many cells the figures stand beside the map, and from so many lines the numbers below it.
_WIDE, _TALL = 90, 24


class TensorPane(Pane):
    """The tensor of the present operation, or of a parameter."""

    NUMBER, TITLE, SHORT = titled(TENSOR)
    HELP = """\
The tensor of the present operation (enter in Operations), or of a parameter (enter in Weights).

Values with a sign are blue below zero and orange above; NaN is ×, Inf ∞. A single token's heads lie under each
other, channels across; what has neither heads nor tokens is folded to fill the pane. With several tokens all of it
is shown: a row a token; m goes on to one token or one head at a time. Every row and column is labelled; beside
the map stand the value under the cursor with its bits, and golden's; statistics of what is shown, and the largest
values with their places (u goes from one to the next).

  m      lay it out otherwise           < >    previous, next token or head
  R      one rank's part, then the next d      less golden's (a parameter: less the checkpoint's)
  , .    same operation, other layer    v      golden's values
  [ ]    look a step back, ahead        u      to the next of the largest values
  a      have it captured from here on  esc    back to the pane before
"""
    HINTS = (
        KeyHint("esc", "back", "escape"),
        KeyHint("m", "layout", "m"),
        KeyHint("< >", "slice", "greater_than_sign"),
        KeyHint("R", "rank", "R"),
        KeyHint("d", "golden diff", "d"),
        KeyHint("u", "largest", "u"),
    )
    EMPTY_KEYS = frozenset({"escape", "R"})
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "arrange", "Lay it out otherwise"),
        Binding("less_than_sign", "slice(-1)", "Previous token or head"),
        Binding("greater_than_sign", "slice(1)", "Next token or head"),
        Binding("d", "show('difference')", "Difference to golden"),
        Binding("v", "show('golden')", "Golden's values"),
        Binding("u", "next_strong", "To the next of the largest values"),
    ]
    DEFAULT_CSS = f"""
    TensorPane > #title {{ height: 2; padding: 0 1; }}
    TensorPane > Horizontal {{ height: 1fr; }}
    TensorPane #left {{ width: 1fr; height: 1fr; padding: 0 0 0 1; }}
    TensorPane #numbers {{ height: auto; padding: 0; margin-top: 1; display: none; }}
    TensorPane.-tall #numbers {{ display: block; }}
    TensorPane #figures {{ width: {SIDE}; height: 1fr; padding: 0 1; }}
    TensorPane.-wide #figures {{ width: {SIDE + 6}; }}
    """
    UNDER_WAY = True
    OF_STEP = False

    difference_of: reactive[str] = reactive("")  # GOLDEN, DIFFERENCE, or the values themselves

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: TensorLook | None = None
        self.parameter: HeldParameter | None = None
        self._way, self._index, self._strong = 0, 0, -1
        self._subject: object = None
        self._asked: Where | None = None

    def content(self) -> Iterable[Widget]:
        """What it is, the map with the figures beside it, the numbers around the cursor."""
        yield TextBlock(id="title")
        yield Horizontal(
            Vertical(Heatmap(id="sheet"), TextBlock(id="numbers"), id="left"), TextBlock(id="figures")
        )

    # --- what is shown -------------------------------------------------------------------------------

    def question(self) -> tuple[Callable[..., TensorLook], Sequence[object]]:
        """The tensor, laid out for the room there is."""
        subject = self.parameter or self.where.tap
        if subject != self._subject:
            self._subject, self._way, self._index, self._strong = subject, 0, 0, -1
        return tensor_look, (self.parameter, self.difference_of, self._way, self._index, self._room)

    @property
    def _room(self) -> tuple[int, int]:
        """The pixels that the map has, about: without the title, the figures, the numbers and its labels."""
        width, height = self.size
        return max(8, width - self._side - 9), max(4, 2 * (height - 7 * self.has_class("-tall") - 4))

    @property
    def _side(self) -> int:
        """The cells of the figures beside the map, with their padding. Known before they are laid out."""
        return SIDE + 6 * self.has_class("-wide")

    def lacks(self) -> str:
        """The tap, from this step on."""
        return "" if self.parameter else f"capture {self._tap}"

    @property
    def of_sequence(self) -> bool:
        """Of a parameter there is one for all."""
        return self.parameter is None

    @property
    def _tap(self) -> str:
        taps = self.overview.taps if self.overview is not None else ()
        return taps[self.where.tap] if self.where.tap < len(taps) else ""

    @property
    def stem(self) -> str:
        """The tensor's name."""
        return file_stem(self.snapshot.tensor.tap.replace(".", "-")) if self.snapshot else super().stem

    def answer(self, snapshot: TensorLook) -> None:
        """Show it, or have the tensor brought that is not there yet."""
        self.snapshot = snapshot
        found, laid = snapshot.tensor, snapshot.sheet
        if self.parameter is None:
            self.shows(found.step)
        if laid is None:
            if self._asked != self.where and not found.note and self.parameter is None:
                self._asked = self.where
                self.post_message(self.Missing(self.where))
            reported = found.note or f"{found.tap} was not captured at step {self.where.step}."
            reported += f"\n\nThis step has {snapshot.others}." if snapshot.others else ""
            fills = f"a  captures it from here on (:{self.lacks()})" if self.lacks() else ""
            self.empty(reported, fills)
            return
        self.filled()
        self._index = laid.index
        signed = bool((laid.elements[np.isfinite(laid.elements)] < 0).any())
        masked = laid.masked or laid.count < laid.values.size
        scale: Scale = "difference" if signed or found.view.startswith(DIFFERENCE) else "magnitude"
        axes = sheet_axes(laid, self.label)
        self.query_one(Heatmap).matrix = Matrix(laid.values, scale, masked=masked, axes=axes)
        self._report()

    def _words(self, place: Coordinates) -> str:
        """A row's or a column's place."""
        laid = self.snapshot.sheet if self.snapshot is not None else None
        return "" if laid is None else place_words(laid, place, self.label)

    # --- words and numbers ---------------------------------------------------------------------------

    def _report(self) -> None:
        """Everything but the map."""
        look = self.snapshot
        if look is None or look.sheet is None:
            return
        self.query_one("#title", TextBlock).show(
            title_lines(look, self.parameter is not None, self._way, self.label)
        )
        self._report_pointed()

    def _report_pointed(self) -> None:
        """The value under the cursor, figures, and the numbers around it."""
        look = self.snapshot
        if look is None or look.sheet is None or look.figures is None:
            return
        heatmap, side = self.query_one(Heatmap), self.query_one("#figures", TextBlock)
        width, height = self._side - 2, self.size.height - 2
        lines = pointed_lines(look.tensor, look.sheet, heatmap.cursor, self.label)
        lines += [[], *figure_lines(look.figures, width, height - len(lines) - 2)]
        room = height - len(lines) - 3
        if room > 0:
            strong = strongest_lines(look.sheet, look.strongest[:room], self._strong, look.texts)
            lines += [[], [("largest", "quiet")], *strong]
        if look.tensor.note:
            lines += [[], *wrapped(look.tensor.note, "wrong", width)]
        side.show(lines)
        beside = self.size.width - self._side - 1
        shown = number_lines(look.sheet, heatmap.cursor, beside, self._words)
        self.query_one("#numbers", TextBlock).show(shown)

    @on(Heatmap.Pointed)
    def _pointed(self, event: Heatmap.Pointed) -> None:
        event.stop()
        self._report_pointed()

    def watch_line(self) -> None:
        """The tokens came in: name them."""
        look = self.snapshot
        if look is not None and look.sheet is not None and not self.has_class("-empty"):
            heatmap = self.query_one(Heatmap)
            if heatmap.matrix is not None:
                heatmap.matrix = replace(heatmap.matrix, axes=sheet_axes(look.sheet, self.label))
            self._report()

    def on_resize(self, event: events.Resize) -> None:
        """What is folded is folded to the room there is."""
        self.set_class(event.size.width >= _WIDE, "-wide")
        self.set_class(event.size.height >= _TALL, "-tall")
        self.again()

    # --- keys ----------------------------------------------------------------------------------------

    def action_arrange(self) -> None:
        """Lay it out otherwise."""
        if self.snapshot is not None and self.snapshot.ways > 1:
            self._way, self._index, self._strong = (self._way + 1) % self.snapshot.ways, 0, -1
            self.again()
        else:
            self.notify("There is only one way to lay this tensor out.")

    def action_slice(self, by: int) -> None:
        """Another token or head."""
        laid = self.snapshot.sheet if self.snapshot is not None else None
        if laid is None or laid.arrangement.sliced is None:
            self.notify("All of the tensor is shown: m lays it out by tokens or heads.")
            return
        self._index, self._strong = (laid.index + by) % len(laid.axes[laid.arrangement.sliced]), -1
        self.again()

    def action_show(self, what: str) -> None:
        """Golden's values or the difference to them, and back."""
        wanted = "" if self.difference_of == what else what
        lacking = self.snapshot is None or self.snapshot.tensor.golden is None
        if wanted and self.parameter is None and lacking and not self.difference_of:
            self.notify(f"No golden reference of {self._tap} here: g compares with one.", severity="warning")
            return
        self.difference_of = wanted
        self.again()

    def action_next_strong(self) -> None:
        """The cursor to the next of the largest values."""
        look = self.snapshot
        if look is not None and look.strongest:
            self._strong = (self._strong + 1) % len(look.strongest)
            one = look.strongest[self._strong]
            self.query_one(Heatmap).cursor = (one.row, one.column)
            self._report_pointed()

    def action_back(self) -> None:
        """Back to the pane before."""
        self.parameter = None
        self.post_message(self.Back())

    def table(self) -> Table | None:
        """The numbers that are shown, a row a row of the map."""
        look = self.snapshot
        if look is None or look.sheet is None:
            return None
        laid, found = look.sheet, look.tensor
        name = self._words if not laid.folded else lambda place: ""
        rows = tuple(
            (name(laid.row(r)) if not laid.folded else self._words(laid.first_of(r)), *map(float, values))
            for r, values in enumerate(laid.values)
        )
        columns = ("row", *(name(laid.column(c)) or f"+{c}" for c in range(laid.values.shape[1])))
        way = laid.arrangement.words(laid.axes)
        return Table(f"{found.tap} {found.view}, {way}, step {found.step}", columns, rows)
