"""What stands around a map, and that the map uses its room."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment
from textual.app import App, ComposeResult
from textual.strip import Strip

from lockstep.workbench.export.colormap import SHADES, shades
from lockstep.workbench.export.pooling import pool
from lockstep.workbench.tui.theme import _PAINTS, DARK, LIGHT
from lockstep.workbench.tui.widgets.axes import Axes, column_labels, row_labels, scale_line
from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.shading import Matrix

WORDS = ("write", " a", " haiku", " about", " rain", "雨の音", ":", "⏎")


def word(index: int) -> str:
    return f"{index} {WORDS[index % len(WORDS)]}"


class _One(App[None]):
    def __init__(self, widget: Heatmap, theme: str = DARK.name) -> None:
        super().__init__()
        self.widget, self.chosen = widget, theme

    def compose(self) -> ComposeResult:
        yield self.widget

    def on_mount(self) -> None:
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = self.chosen


def _text(heatmap: Heatmap) -> list[str]:
    return [line.text for line in heatmap.render_lines(heatmap.size.region)]


def _axes(**named: str) -> Axes:
    return Axes(word, word, "q", "k", **named)


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(8, 200), st.integers(8, 120))
def test_a_map_has_rows_of_one_height_and_is_not_stretched(
    rows: int, columns: int, width: int, height: int
) -> None:
    pixels = pool(np.zeros((rows, columns), np.float32), width, height)
    wide, tall = len(pixels.columns), len(pixels.rows)
    assert wide <= width
    assert tall <= height
    heights = set(np.bincount(pixels.rows, minlength=rows).tolist())
    assert len(heights) == 1 if rows <= height else heights == {0, 1}, "every row is drawn, and alike"
    assert set(pixels.columns.tolist()) == set(range(columns)) or columns > width
    across, down = max(1.0, wide / columns), max(1.0, tall / rows)
    assert across <= 4.1 * down + 1
    assert down <= 4.1 * across + 1


@settings(deadline=None)
@given(st.integers(20, 400), st.integers(20, 400), st.integers(20, 200), st.integers(20, 120))
def test_a_map_of_some_size_leaves_room_for_no_larger_elements(
    rows: int, columns: int, width: int, height: int
) -> None:
    pixels = pool(np.zeros((rows, columns), np.float32), width, height)
    stretched = max(width / columns, 1) / max(height // rows, 1)
    if 0.25 <= stretched <= 4:
        assert len(pixels.columns) >= 0.8 * width
        lines = len(pixels.rows) % (2 * rows) == 0  # rows that end where lines end may leave a pixel each
        assert height - len(pixels.rows) < (2 if lines else 1) * rows


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(12, 150), st.integers(2, 80))
def test_labels_stand_at_what_they_name(count: int, width: int, height: int) -> None:
    pixels = pool(np.zeros((count, count), np.float32), width, 2 * height)
    above, cells = column_labels(_axes(), pixels, width)
    assert cell_len(above) == width
    assert above.startswith("0 w"), "the first column is always named"
    assert not cells
    pinned = count * 2 // 3
    with_one, cells = column_labels(_axes(), pixels, width, pinned)
    assert cell_len(with_one) == width
    shown = Strip([Segment(with_one)])
    assert shown.crop(cells.start, cells.stop).text in (word(pinned), fit(word(pinned), width))
    beside_it = shown.crop(0, cells.start).text[-1:] + shown.crop(cells.stop, width).text[:1]
    assert not beside_it.strip(), "no other label touches it, or is left in part"
    for found in re.finditer(r"(\d+) \S", above):
        start, named = cell_len(above[: found.start()]), int(found[1])
        assert pixels.columns[start] <= named, "it stands above its column, or the one that stands for it"
        assert start == 0 or pixels.columns[start - 1] < named
    beside = row_labels(_axes(), pixels, 10)
    assert len(beside) == -(-len(pixels.rows) // 2)
    assert all(cell_len(label) == 10 for label in beside)
    for y, label in enumerate(beside):
        if label.strip():
            assert int(label.split()[0]) in pixels.rows[2 * y : 2 * y + 2]


@pytest.mark.parametrize("size", [(44, 20), (90, 30), (140, 50)])
async def test_a_map_has_labels_on_both_axes_a_scale_and_reports_how_it_is_pooled(
    size: tuple[int, int],
) -> None:
    values = np.random.default_rng(0).random((300, 300)).astype(np.float32)
    values[200, 100] = 3.5
    values[7, 9] = np.nan
    heatmap = Heatmap(Matrix(values, axes=_axes(unit="probability")))
    async with _One(heatmap).run_test(size=size) as pilot:
        lines = _text(heatmap)
        assert lines[0].startswith("q↓ k→")
        assert "0 write" in lines[0]
        assert lines[1].startswith("0 write")
        assert sum(line.split(" ")[0].isdecimal() for line in lines[1:-1]) == len(lines) - 2
        assert lines[-1].startswith("0 ")
        assert " 3.50  probability  " in lines[-1]
        if size[0] > 80:
            down, across = 300 / (2 * (size[1] - 2)), 300 / (size[0] - 10)
            pooled = re.search(r"max-pooled (\d+) × (\d+)  × NaN", lines[-1])
            assert pooled is not None
            assert (int(pooled[1]), int(pooled[2])) == (math.ceil(down), math.ceil(across))
        else:
            assert lines[-1].rstrip().endswith("…"), "cut, and shown as such"
        heatmap.focus()
        await pilot.press("end", "pagedown", "pagedown")
        lines = _text(heatmap)
        row, column = heatmap.cursor
        marked = next(i for i, line in enumerate(lines) if "◆" in line)
        assert any(line.startswith(word(row)[:9]) for line in lines[marked - 1 : marked + 1])
        assert word(column) in lines[0]


async def test_a_small_map_names_every_row_and_is_not_shown_as_pooled() -> None:
    heatmap = Heatmap(Matrix(np.eye(8, dtype=np.float32), axes=_axes()))
    async with _One(heatmap).run_test(size=(90, 30)):
        lines = [line for line in _text(heatmap) if line.strip()]
        for index in range(8):
            assert word(index).strip() in lines[0]
            assert sum(line.startswith(f"{index} ") for line in lines[1:-1]) == 1
        assert "pooled" not in lines[-1]


async def test_a_click_on_a_labelled_map_points_at_the_element_under_it() -> None:
    heatmap = Heatmap(Matrix(np.eye(8, dtype=np.float32), axes=_axes()))
    async with _One(heatmap).run_test(size=(90, 30)) as pilot:
        lines = _text(heatmap)
        y = next(y for y, line in enumerate(lines) if line.startswith("5 "))
        await pilot.click(Heatmap, offset=(cell_len(lines[0][: lines[0].index("3 ")]), y))
        assert heatmap.cursor == (5, 3)
        await pilot.click(Heatmap, offset=(2, 0))
        assert heatmap.cursor == (5, 3), "the labels are no part of the map"


def _lightness(colour: str) -> float:
    linear = [
        (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
        for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return float(116 * y ** (1 / 3) - 16)


@pytest.mark.parametrize(
    ("dark", "order"), [(True, sorted), (False, lambda found: sorted(found, reverse=True))]
)
def test_magnitudes_begin_near_the_ground_and_are_even(
    dark: bool, order: Callable[[list[float]], list[float]]
) -> None:
    found = [_lightness(colour) for colour in shades("magnitude", dark)]
    assert found == order(found)
    steps = np.abs(np.diff(found))
    assert steps.max() < 3 * 80 / SHADES
    ground = _lightness("#14171c" if dark else "#fbfaf7")
    assert abs(found[0] - ground) < 12, "what is nothing does not stand out"


async def test_on_a_light_ground_the_map_is_light() -> None:
    seen = {}
    for theme in (DARK.name, LIGHT.name):
        heatmap = Heatmap(Matrix(np.tril(np.ones((20, 20), np.float32)) * 1e-3, top=1.0))
        async with _One(heatmap, theme).run_test(size=(40, 20)):
            line = heatmap.render_lines(heatmap.size.region)[10]
            colours = {
                segment.style.bgcolor.name for segment in line if segment.style and segment.style.bgcolor
            }
            seen[theme] = [_lightness(colour) for colour in colours]
    assert max(seen[DARK.name]) < 30
    assert min(seen[LIGHT.name]) > 80


def test_what_is_to_be_known_of_a_map_takes_the_room_of_its_scale() -> None:
    notes = ("max-pooled 3 × 2", "× NaN")
    lines = {
        width: "".join(
            one.text for one in scale_line("magnitude", 1.0, _PAINTS[DARK.name], width, notes=notes)
        )
        for width in (36, 80)
    }
    assert all(line.rstrip().endswith("max-pooled 3 × 2  × NaN") for line in lines.values())
    assert len(lines[36]) == 36
