"""One tensor over the whole screen: colours, the numbers around the cursor, figures, histogram."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.reactive import reactive
from textual.screen import Screen

from workbench.export.table import Table
from workbench.paths import file_stem
from workbench.tui import screenshots
from workbench.tui.guard import Guarded
from workbench.tui.reader import Reader
from workbench.tui.screens.exporter import Exporter
from workbench.tui.screens.tensor_text import figure_lines, number_lines
from workbench.tui.screenshots import Screenshot
from workbench.tui.widgets.divider import Divider
from workbench.tui.widgets.heatmap import Heatmap
from workbench.tui.widgets.key_bar import KeyBar, KeyHint
from workbench.tui.widgets.shading import Matrix
from workbench.tui.widgets.status_line import Fact, StatusLine
from workbench.tui.widgets.text_block import TextBlock, TextLine
from workbench.views.overview import Overview
from workbench.views.rank_weights import shape_text
from workbench.views.tensor import Tensor, plane, tensor
from workbench.views.where import Where


class TensorScreen(Guarded, Screen[None]):
    """A tap's tensor. Escape goes back."""

    CSS_PATH = "../styles/tensor.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Back"),
        Binding("y", "copy", "Copy the numbers"),
        Binding("e", "export", "Export"),
        Binding("R", "view(1)", "Next view: rebuilt, a rank, golden, difference"),
        Binding("full_stop", "slice(1)", "Next slice"),
        Binding("comma", "slice(-1)", "Previous slice"),
        Binding("right_square_bracket,n", "step(1)", "Next step"),
        Binding("left_square_bracket,N", "step(-1)", "Previous step"),
    ]

    where: reactive[Where] = reactive(Where())
    view: reactive[str] = reactive("rebuilt")

    def __init__(self, reader: Reader, overview: Overview, where: Where, view: str = "rebuilt") -> None:
        super().__init__()
        self.reader, self.overview = reader, overview
        self.snapshot: Tensor | None = None
        self.exporter = Exporter(self, self._picture, self._table, self._tell)
        self._index: tuple[int, ...] = ()
        self.set_reactive(TensorScreen.where, where)
        self.set_reactive(TensorScreen.view, view)

    def compose(self) -> ComposeResult:
        """A title, the heatmap with the figures beside it, the numbers under it."""
        yield StatusLine(id="title")
        yield Divider()
        with Horizontal(id="body"):
            yield Vertical(Heatmap(id="heatmap"), TextBlock(id="numbers"), id="left")
            yield TextBlock(id="figures")
        yield TextBlock(id="nothing")
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Read the tensor."""
        self.query_one(KeyBar).show(
            [
                KeyHint("esc", "back", "escape"),
                KeyHint("R", "ranks, golden, difference", "R"),
                KeyHint(", .", "slice", "full_stop"),
                KeyHint("[ ]", "step", "right_square_bracket"),
                KeyHint("e", "export", "e"),
                KeyHint("↑↓←→", "cursor", "down"),
            ]
        )
        self.query_one(Heatmap).focus()
        self._read()

    @work(exclusive=True, group="tensor")
    async def _read(self) -> None:
        question, arguments = self.question()
        self.snapshot = await self.reader.ask(question, self.where, *arguments)
        self._draw()

    def question(self) -> tuple[Callable[..., Tensor], Sequence[object]]:
        """What to ask the reader for the present view."""
        return tensor, (self.where.tap, self.view)

    def missing(self, found: Tensor) -> list[TextLine]:
        """What to say where there is no tensor: why, and what would bring it."""
        told = found.note or f"{found.tap} was not captured at step {self.where.step}."
        return [
            [(told, "quiet")],
            [],
            [
                (f":capture {found.tap}", "text"),
                ("  in the live run captures it, from this step on", "quiet"),
            ],
        ]

    def place(self) -> tuple[Fact, ...]:
        """Where this is, for the right of the title."""
        return (Fact(f"step {self.where.step}", "accent"),)

    def _draw(self) -> None:
        found = self.snapshot
        assert found is not None
        self.set_class(found.array is None, "-nothing")
        shape = shape_text(found.array.shape) if found.array is not None else ""
        self.query_one("#title", StatusLine).show(
            (
                Fact(found.tap, "strong"),
                Fact(
                    found.view,
                    f"rank{int(found.view[5:]) % 4}" if found.view.startswith("rank") else "accent",
                ),
                Fact(f"{shape} {found.dtype}".strip(), "text"),
                Fact(found.slice, "quiet", drop=2),
                Fact(found.layout, "quiet", drop=3),
            ),
            self.place(),
        )
        if found.array is None:
            self.query_one("#nothing", TextBlock).show(self.missing(found))
            return
        leading = found.array.shape[:-2]
        self._index = tuple(
            min(i, size - 1) for i, size in zip(self._index or (0,) * len(leading), leading, strict=False)
        )
        self._index += (0,) * (len(leading) - len(self._index))
        scale = "difference" if found.view.startswith("difference") else "magnitude"
        masked = found.tap.endswith((".scores", ".probs"))
        self.query_one(Heatmap).matrix = Matrix(self._plane(found.array), scale, masked=masked)  # type: ignore[arg-type]
        self._show_figures(found.array)
        self._show_numbers()

    def action_copy(self) -> None:
        """The numbers of the slice to the clipboard."""
        self.exporter.copy()

    def action_export(self) -> None:
        """What is shown to a file."""
        self.exporter.ask()

    def _tell(self, text: str, wrong: bool) -> None:
        self.notify(text, severity="warning" if wrong else "information")

    def _table(self) -> Table | None:
        """The numbers of the slice that is shown."""
        found = self.snapshot
        if found is None or found.array is None:
            return None
        values = self._plane(found.array)
        rows = tuple((i, *(float(x) for x in row)) for i, row in enumerate(values))
        slice_ = f"[{', '.join(map(str, self._index))}]" if self._index else ""
        columns = ("row", *(f"c{column}" for column in range(values.shape[1])))
        return Table(f"{found.tap}{slice_} {found.view}, step {self.where.step}", columns, rows)

    def _picture(self) -> tuple[Screenshot, str] | None:
        """The heatmap with its figures."""
        if self.snapshot is None:
            return None
        title = f"{self.overview.model}: {self.snapshot.tap} {self.snapshot.view}, step {self.where.step}"
        stem = f"{file_stem(self.snapshot.tap.replace('.', '-'))}-step{self.where.step}"
        return screenshots.taken(self, self.query_one("#body").region, title, self._table()), stem

    def _plane(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return plane(array, self._index)

    def _show_figures(self, array: NDArray[np.float32]) -> None:
        """The statistics of the slice."""
        lines: list[TextLine] = []
        if self._index:
            place = ", ".join(map(str, self._index))
            slice_: TextLine = [
                ("slice  ", "quiet"), (f"[{place}, :, :]", "strong"), (f" of {array.shape[0]}", "quiet")
            ]  # fmt: skip
            lines += [slice_, []]
        lines += figure_lines(self._plane(array))
        if self.snapshot is not None and self.snapshot.note:
            lines += [[], [(self.snapshot.note, "wrong")]]
        self.query_one("#figures", TextBlock).show(lines)

    def _show_numbers(self) -> None:
        """The numbers around the cursor, the one under it marked."""
        heatmap = self.query_one(Heatmap)
        if heatmap.matrix is not None:
            lines = number_lines(heatmap.matrix.values, heatmap.cursor, heatmap.size.width)
            self.query_one("#numbers", TextBlock).show(lines)

    @on(Heatmap.Pointed)
    def _pointed(self) -> None:
        self._show_numbers()

    def watch_where(self) -> None:
        """Another step."""
        self._read()

    def watch_view(self) -> None:
        """Another view."""
        self._read()

    def action_view(self, by: int) -> None:
        """Rebuilt, each rank, golden, difference."""
        if self.snapshot is not None:
            views = self.snapshot.views
            self.view = views[(views.index(self.snapshot.view) + by) % len(views)]

    def action_slice(self, by: int) -> None:
        """Another index of the first dimension (a head, a token)."""
        if self.snapshot is not None and self.snapshot.array is not None and self._index:
            size = self.snapshot.array.shape[0]
            self._index = ((self._index[0] + by) % size, *self._index[1:])
            self._draw()

    async def action_step(self, by: int) -> None:
        """Another step of the same tap."""
        steps = await self.reader.ask(lambda source: source.session.steps(self.where.branch))
        if self.where.step + by in steps:
            self.where = replace(self.where, step=self.where.step + by)

    def on_key_bar_pressed(self, event: KeyBar.Pressed) -> None:
        """A clicked hint is its key."""
        self.app.simulate_key(event.hint.press)
