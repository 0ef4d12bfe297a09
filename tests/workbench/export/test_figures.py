"""Figures: the picture holds the numbers, and what is not finite cannot be overlooked."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from xml.etree import ElementTree

import numpy as np
import pytest

from lockstep.workbench.export.colormap import SHADES, shades
from lockstep.workbench.export.heatmap_svg import heatmap
from lockstep.workbench.export.plots import depth_plot, sparkline
from lockstep.workbench.export.svg import Picture, el, path_of, standalone
from lockstep.workbench.views.verdicts import Judged


def _pixels(markup: str) -> tuple[np.ndarray, list[tuple[int, ...]], bytes]:
    """Indices [rows, columns], palette and transparency of the picture in a heatmap."""
    found = re.search(r'href="data:image/png;base64,([^"]+)"', markup)
    assert found is not None
    png = base64.b64decode(found[1])
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        chunks[png[at + 4 : at + 8]] = png[at + 8 : at + 8 + length]
        at += 12 + length
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)[:, 1:]
    palette = [tuple(chunks[b"PLTE"][i : i + 3]) for i in range(0, len(chunks[b"PLTE"]), 3)]
    return rows, palette, chunks[b"tRNS"]


def test_a_heatmaps_colours_follow_the_numbers() -> None:
    matrix = np.linspace(0, 8, 12, dtype=np.float32).reshape(3, 4)
    drawn = heatmap(matrix, 40, 30)
    indices, palette, _ = _pixels(drawn.markup)
    small = indices[:: indices.shape[0] // 3, :: indices.shape[1] // 4]
    np.testing.assert_array_equal(small, np.round(matrix / 8 * (SHADES - 1)))
    assert (drawn.top, drawn.pooled) == (8.0, False)
    assert palette[SHADES - 1] == tuple(bytes.fromhex(shades("magnitude", False)[-1][1:]))


def test_differences_stand_around_the_middle() -> None:
    drawn = heatmap(np.array([[-2.0, 0.0, 1.0]], np.float32), 30, 10, scale="difference")
    indices, _, _ = _pixels(drawn.markup)
    row = indices[0, :: indices.shape[1] // 3].tolist()
    assert row == [0, SHADES // 2, round(0.75 * (SHADES - 1))]


def test_one_nan_among_a_million_survives_and_the_unknown_is_clear() -> None:
    matrix = np.zeros((1000, 1000), np.float32)
    matrix[777, 333], matrix[5, 5] = np.nan, np.inf
    known = np.ones_like(matrix, bool)
    known[:, 500:] = False
    drawn = heatmap(matrix, 100, 100, known=known, pixels=100)
    indices, palette, clear = _pixels(drawn.markup)
    assert drawn.pooled
    assert indices[77 * indices.shape[0] // 100, 33 * indices.shape[1] // 100] == SHADES
    assert indices[0, 0] == SHADES + 1
    assert (indices[:, indices.shape[1] // 2 :] == SHADES + 2).all()
    assert clear[SHADES + 2] == 0
    assert set(clear[: SHADES + 2]) == {255}
    assert palette[SHADES] not in palette[:SHADES]


def test_large_cells_carry_glyphs() -> None:
    markup = heatmap(np.array([[np.nan, 1.0], [np.inf, 2.0]], np.float32), 40, 40).markup
    assert (markup.count("×"), markup.count("∞")) == (1, 1)


def _judged(index: int, state: str, error: float | None) -> Judged:
    layer, operation = divmod(index, 4)
    names = ("attn_norm", "attn.q_proj", "attn.scores", "mlp_residual")
    return Judged(
        0, 2, f"layers.{layer}.{names[operation]}", layer, names[operation], state,  # type: ignore[arg-type]
        error, None, None, 1e-7, None, "<b>why</b>", (),
    )  # fmt: skip


def test_the_depth_plot_marks_the_first_and_shows_what_has_no_number() -> None:
    taps = [
        _judged(0, "pass", 1e-7),
        _judged(1, "fail", 0.5),
        _judged(2, "inherited", None),
        _judged(3, "absent", None),
    ]
    plot = depth_plot(taps, taps[1])
    assert plot is not None
    root = ElementTree.fromstring(f"<svg>{plot.content}</svg>")
    circles = root.findall(".//circle")
    assert [c.get("class") for c in circles] == ["dot", "dot wrong", "ring"]
    assert float(circles[0].get("cy", "nan")) > float(circles[1].get("cy", "nan"))
    assert circles[2].get("cx") == circles[1].get("cx")
    texts = [t for t in root.findall(".//text") if "wrong" in (t.get("class") or "")]
    assert [t.text or (t[0].tail or "") for t in texts] == ["×", "layers.0.attn.q_proj"]
    assert depth_plot([taps[3]], None) is None


def test_a_sparkline_breaks_where_values_do() -> None:
    values = np.array([[1, 2, np.nan, 4]], np.float32)
    broken = np.array([[False, False, True, False]])
    root = ElementTree.fromstring(f"<svg>{sparkline(values, broken, 'x').content}</svg>")
    (line,) = root.findall("path")
    assert (line.get("d") or "").count("M") == 2
    assert len(root.findall("rect")) == 1


def test_constant_and_empty_series_are_drawn() -> None:
    for values in (np.zeros((2, 5)), np.full((1, 3), np.nan), np.zeros((2, 0))):
        array = values.astype(np.float32)
        content = sparkline(array, np.zeros(array.shape, bool), "x").content
        assert "nan" not in content


def test_elements_escape_what_is_foreign() -> None:
    markup = el("text", '<script>"', class_='"><b>', x=1.23456)
    root = ElementTree.fromstring(markup)
    assert (root.text, root.get("class"), root.get("x"), len(root)) == ('<script>"', '"><b>', "1.23", 0)


@pytest.mark.parametrize("dark", [False, True])
def test_a_file_of_its_own_is_whole(dark: bool) -> None:
    text = standalone(Picture.of(10, 20, "a <b>", el("rect", class_="dot wrong")), dark=dark)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root[0].text == "a <b>"
    assert "var(" not in text


def test_paths_lift_the_pen() -> None:
    assert path_of([(0, 0), (1, 1), None, (math.pi, 2)]) == "M0 0L1 1M3.14 2h.5"
