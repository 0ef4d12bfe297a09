"""Many small matrices of one shape beside each other, each under its title, on one scale; one of them is selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from lockstep.workbench.export.colormap import Scale
from lockstep.workbench.export.pooling import pool
from lockstep.workbench.tui.widgets.axes import notes_of, scale_line
from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.painted import PaintedWidget
from lockstep.workbench.tui.widgets.shading import Matrix, lines

_GAP = 2


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """`values[tiles, rows, columns]` with a title and a rank (its hue) for each tile, on one colour scale: `top` is the
    strongest (None: the largest magnitude), `unit`: of what. -inf is nothing. Equal are those of the same array."""

    values: NDArray[np.float32]
    titles: tuple[str, ...]
    ranks: tuple[int, ...]
    scale: Scale = "magnitude"
    top: float | None = None
    unit: str = ""

    @property
    def _compared(self) -> tuple[object, ...]:
        return id(self.values), self.titles, self.ranks, self.scale, self.top, self.unit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tiles) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)


class Multiples(PaintedWidget, can_focus=True):
    """Small multiples. Posts `Picked` when a tile is clicked or the arrows reach it, `Chosen` for one to look into."""

    DEFAULT_CSS = "Multiples { height: 1fr; width: 1fr; }"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,up", "move(-1)", "Previous", show=False),
        Binding("right,down", "move(1)", "Next", show=False),
        Binding("home", "move(-1000000)", "First", show=False),
        Binding("end", "move(1000000)", "Last", show=False),
        Binding("enter", "choose", "Large", show=False),
    ]

    tiles: reactive[Tiles | None] = reactive(None)
    selected: reactive[int] = reactive(0)

    @dataclass
    class Picked(Message):
        """Another tile was selected by the user."""

        tile: int

    @dataclass
    class Chosen(Message):
        """Enter, or a second click on a tile."""

        tile: int

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._drawn: list[list[list[Segment]]] = []
        self._drawn_for: tuple[object, ...] = ()
        self._scale: list[Segment] = []
        self._laid_out = (1, 1, 1)

    def _layout(self) -> tuple[int, int, int]:
        """Tiles in a row, and each tile's width and height in cells (without its title)."""
        assert self.tiles is not None
        count, rows, columns = self.tiles.values.shape
        best, size = (1, 1, 1), 0.0
        for across in range(1, count + 1):
            down = -(-count // across)
            width = self.size.width // across - _GAP
            height = (self.size.height - 1) // down - 1
            scale = min(width / columns, 2 * height / rows) if width > 1 and height > 0 else 0
            if scale > size:
                best, size = (across, width, height), scale
        return best

    def render_line(self, y: int) -> Strip:
        """A line of titles, or a line of every tile of one row."""
        width = self.size.width
        if self.tiles is None or not self.tiles.values.size:
            return Strip.blank(width, self.ground)
        self._draw()
        across, tile_width, tile_height = self._laid_out
        if y == self.size.height - 1:
            return Strip(self._scale).adjust_cell_length(width, self.ground)
        row, inside = divmod(y, tile_height + 1)
        segments: list[Segment] = []
        shown = range(row * across, min((row + 1) * across, len(self.tiles.titles)))
        for tile in shown:
            segments += (
                self._title(tile, tile_width) if inside == 0 else self._body(tile, inside - 1, tile_width)
            )
            segments.append(Segment(" " * _GAP, self.ground))
        return Strip(segments, len(shown) * (tile_width + _GAP)).adjust_cell_length(width, self.ground)

    def _draw(self) -> None:
        key = (self.tiles, self.size, self.app.theme)
        if key == self._drawn_for or self.tiles is None:
            return
        _, width, height = self._laid_out = self._layout()
        tiles = self.tiles
        limit = Matrix(tiles.values.reshape(len(tiles.values), -1), top=tiles.top).limit
        pooled = pool(tiles.values, width, 2 * height, masked=True)
        self._drawn = [
            lines(replace(pooled, values=drawn, kind=kind), Matrix(values, tiles.scale), self.paint, limit)
            for drawn, kind, values in zip(pooled.values, pooled.kind, tiles.values, strict=True)
        ]
        notes = notes_of(pooled, tiles.values[0].shape)
        self._scale = scale_line(
            tiles.scale, limit, self.paint, self.size.width - 2, unit=tiles.unit, notes=notes
        )
        self._drawn_for = key

    def _title(self, tile: int, width: int) -> Sequence[Segment]:
        assert self.tiles is not None
        styles = self.paint
        style = styles.present if tile == self.selected else styles.rank(self.tiles.ranks[tile])
        title = self.tiles.titles[tile]
        title = fit(title, min(width, cell_len(title)))
        return [Segment(title, self.ground + style), Segment(" " * (width - cell_len(title)), self.ground)]

    def _body(self, tile: int, y: int, width: int) -> Sequence[Segment]:
        drawn = self._drawn[tile]
        if y >= len(drawn):
            return [Segment(" " * width, self.ground)]
        return [*drawn[y], Segment(" " * (width - len(drawn[y])), self.ground)]

    def on_click(self, event: events.Click) -> None:
        """Select the tile."""
        if self.tiles is None:
            return
        across, width, height = self._laid_out
        tile = event.y // (height + 1) * across + min(event.x // (width + _GAP), across - 1)
        if tile >= len(self.tiles.titles) or event.y >= self.size.height - 1:
            return
        if tile == self.selected and event.chain > 1:
            self.post_message(self.Chosen(tile))
        self._pick(tile)

    def action_move(self, by: int) -> None:
        """Select another tile."""
        if self.tiles is not None:
            self._pick(min(max(0, self.selected + by), len(self.tiles.titles) - 1))

    def action_choose(self) -> None:
        """Look into the selected tile."""
        self.post_message(self.Chosen(self.selected))

    def _pick(self, tile: int) -> None:
        if tile != self.selected:
            self.selected = tile
            self.post_message(self.Picked(tile))
