"""The picture of a terminal's cells: valid, self-contained, every cell in its place, foreign text only text."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lockstep.workbench.export.cells import HEIGHT, WIDTH, CellRun, cells_svg
from lockstep.workbench.export.png import rasterised
from lockstep.workbench.export.table import Table, as_html, as_json, as_text

_SVG = "{http://www.w3.org/2000/svg}"
GROUND, INK = "#101010", "#eeeeee"


def _drawn(*runs: CellRun) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(cells_svg([runs], "a <title>", GROUND))
    return [one for one in root if one.tag in (f"{_SVG}text", f"{_SVG}rect")][1:]  # the first is the ground


def test_letters_stand_in_their_cells_whatever_is_before_them() -> None:
    first, second = _drawn(CellRun("  ab  c ", 8, INK, GROUND), CellRun("雨", 2, INK, GROUND, bold=True))
    assert first.text == "ab\u00a0\u00a0c"
    assert float(first.get("x", 0)) == pytest.approx(12 + 2 * WIDTH, abs=0.01)
    assert float(first.get("textLength", 0)) == pytest.approx(5 * WIDTH, abs=0.01)
    assert float(second.get("x", 0)) == pytest.approx(12 + 8 * WIDTH, abs=0.01)
    assert second.get("class") == "b"


def test_blocks_are_rectangles_and_equal_neighbours_one() -> None:
    half, bar, eighth = _drawn(CellRun("▄▄ █", 4, INK, GROUND), CellRun("▏", 1, INK, GROUND))
    assert float(half.get("width", 0)) == pytest.approx(2 * WIDTH, abs=0.01)
    assert float(half.get("y", 0)) == pytest.approx(12 + HEIGHT / 2, abs=0.01)
    assert float(bar.get("x", 0)) == pytest.approx(12 + 3 * WIDTH, abs=0.01)
    assert float(eighth.get("width", 0)) == pytest.approx(WIDTH / 8, abs=0.01)


def test_nothing_foreign_becomes_markup_and_nothing_is_fetched() -> None:
    svg = cells_svg([[CellRun("<script>&\x1b[31m", 12, INK, GROUND)]], "</title>", GROUND)
    assert "<script" not in svg
    assert "\x1b" not in svg
    assert svg.count("http") == 1, "the namespace"
    page = as_html(Table("<b>", ("<i>",), (("<script>alert(1)</script>",), (1.5,))), "<u>", svg)
    assert "<script" not in page
    assert "<i>" not in page


def test_a_picture_as_png_has_its_pixels() -> None:
    png = rasterised(cells_svg([[CellRun("█", 1, "#ff0000", GROUND)]], "", GROUND), zoom=1.0)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(png) > 100


def test_a_table_keeps_what_is_not_a_number() -> None:
    table = Table("t", ("a", "b"), ((float("nan"), None), ("x\ty", True)))
    assert '"nan"' in as_json(table)
    assert as_text(table).splitlines()[1] == "nan\t"
