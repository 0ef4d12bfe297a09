"""CSV: text stays text in a spreadsheet, numbers stay numbers."""

from __future__ import annotations

import csv as standard
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.workbench.export import csv


def _written(columns: list[str], rows: list[list[object]]) -> list[list[str]]:
    out = io.StringIO(newline="")
    assert csv.write(out, columns, rows) == len(rows)
    return list(standard.reader(io.StringIO(out.getvalue(), newline="")))


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "  =1", "\t=1", "\r=1", "＝1", "|x", "%0"]
)
def test_a_formula_is_quoted(text: str) -> None:
    (_, (cell,)) = _written(["name"], [[text]])
    assert cell[0] not in "=+-@|%＝\t\r"


def test_numbers_keep_their_sign_and_nothing_is_lost() -> None:
    (_, row) = _written(list("abcdef"), [[-3, -0.5, math.nan, -math.inf, None, True]])
    assert row == ["-3", "-0.5", "nan", "-inf", "", "true"]


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_any_text_comes_back_as_one_cell_without_controls(texts: list[str]) -> None:
    (_, row) = _written(["x"] * len(texts), [list(texts)])
    assert len(row) == len(texts)
    assert not any(c < " " or c == "\x7f" for text in row for c in text)
    assert not any(text.lstrip()[:1] in tuple("=+-@") for text in row)


def test_float32_survives() -> None:
    (_, (cell,)) = _written(["x"], [[0.1234567836]])
    assert float(cell) == pytest.approx(0.1234567836, rel=1e-8)
