"""Numbers as text: one form each, and NaN is never passed off as a number."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.words.numbers import cell, chance, fixed, number, scalar, times
from tests.workbench.tui.odd import build_odd


@pytest.mark.parametrize(
    ("probability", "reported"),
    [
        (None, "-"), (math.nan, "NaN"), (math.inf, "∞"), (0.0, "0"), (1.0, "1.0000"), (0.6065, "0.6065"),
        (0.01, "0.0100"), (1 / 120, "0.0083"), (1 / 39_800, "2.5e-5"), (4e-8, "4.0e-8"),
    ],
)  # fmt: skip
def test_a_probability_shows_something(probability: float | None, reported: str) -> None:
    assert chance(probability) == reported


@pytest.mark.parametrize(
    ("ratio", "reported"),
    [
        (1.44, "1.4"), (12.3, "12"), (208_123.0, "210,000"), (3.456e9, "3.5e9"), (math.inf, "∞"), (math.nan, "NaN"),
    ],
)  # fmt: skip
def test_a_ratio_reports_how_many_times(ratio: float, reported: str) -> None:
    assert times(ratio) == reported


def test_decimals_only_of_numbers() -> None:
    assert [fixed(value, 2) for value in (1.0, math.nan, -math.inf, None)] == ["1.00", "NaN", "-∞", "-"]


def test_what_is_no_number_is_drawn_alike_by_all() -> None:
    for value in (math.nan, math.inf, -math.inf):
        assert {scalar(value), cell(value), fixed(value, 2), number(value)} == {number(value)}
    assert [cell(value) for value in (820.0, 0.0, -3.0, 2.5, 12345.0)] == ["820", "0", "-3", "2.500", "12345"]
    assert [scalar(value) for value in (2.0, 0.5, 1 / 3)] == ["2", "0.5", "0.333333"]


@pytest.mark.parametrize(("kind", "sign"), [("nan", "NaN"), ("inf", "∞")])
def test_commands_draw_it_as_the_panes_do(tmp_path: Path, kind: str, sign: str) -> None:
    with open_replay(build_odd(tmp_path / "odd.session", kind)) as debugger:
        debugger.execute("goto 1")
        lines = ("topk", "attn 0 0", "frame logits", "print layers.0.attn.probs", "x layers.0.attn.probs[0, 0, :2]",
                 "print max(logits)")  # fmt: skip
        for line in lines:
            shown = debugger.execute(line).to_text()
            columns = (
                re.sub(r"\bnan\b|\binf\b", "", shown.splitlines()[1]) if line.startswith("frame") else ""
            )
            values = shown.replace(shown.splitlines()[1], columns) if columns else shown
            assert not re.search(r"\bnan\b|\binf\b", values), (line, shown)
            assert sign in values or line in ("frame logits", "print max(logits)"), (line, shown)
