"""`lockstep regress`: what is printed fits a screen, and ends with the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.workbench.checking.regression import Regression
from lockstep.workbench.cli.regress import report
from lockstep.workbench.diagnosis.row_comparison import RowComparison, TapRows
from lockstep.workbench.judgements.coverage import Coverage


def diverged(taps: int, own: int) -> Regression:
    """So many taps that differ, of which that with the index `own` does by itself."""
    rows = tuple(
        TapRows(f"layers.{i}.mlp.up", "tensor", 6, 6, (0, 0), 6 * (i == own), (0, 0) if i == own else None)
        for i in range(taps)
    )
    return Regression("diverged", Coverage(rows=6, aligned=6), RowComparison(6, 1, rows, (), (), ()), 0.0)


def printed(reported: Regression, capsys: Any) -> list[str]:
    report(reported, Path("new.session"), Path("good.session"), None, None, False)
    return str(capsys.readouterr().out).splitlines()


def test_the_verdict_comes_last_and_the_table_fits_a_screen(capsys: Any) -> None:
    lines = printed(diverged(80, own=70), capsys)
    assert len(lines) <= 24
    assert lines[-1].startswith("diverged, bit for bit: 80 of 80 taps differ; the first with equal inputs")
    shown = [line.split()[0] for line in lines if line.lstrip().startswith("layers.")]
    assert shown == ["layers.70.mlp.up", *(f"layers.{i}.mlp.up" for i in range(11))]
    assert "and 68 more: `lockstep diff good.session new.session --bitwise` shows all of them" in lines


def test_a_short_table_is_whole(capsys: Any) -> None:
    lines = printed(diverged(3, own=0), capsys)
    assert sum("layers." in line for line in lines[:-1]) == 3
    assert not any(" more: " in line for line in lines)


def test_a_match_is_within_rounding_and_a_difference_beyond_it(capsys: Any) -> None:
    rows = (TapRows("embed", "tensor", 6, 0, None, 0, None),)
    same = Regression(
        "match", Coverage(rows=6, aligned=6), RowComparison(6, 1, rows, (), (), ()), tolerance=3e-5
    )
    assert printed(same, capsys)[-1].startswith("match, within rounding (3e-05 relative): ")
    other = replace(diverged(3, own=0), tolerance=3e-5)
    assert printed(other, capsys)[-1].startswith("diverged, beyond rounding (3e-05 relative): ")
