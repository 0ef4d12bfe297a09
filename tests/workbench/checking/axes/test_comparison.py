"""Two variants of one run: rounding accuses nobody, what is wrong in one of them is named, behind rounding too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.workbench.checking.axes.axis import AxisResult
from lockstep.workbench.checking.axes.comparison import Variants
from lockstep.workbench.checking.axes.row_judge import RowJudge
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.row_sides import RowSide
from tests.workbench.diagnosis.synthetic import Case, Place, Spoil, synthetic, tiny_case

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    found = tiny_case(tmp_path_factory.mktemp("case"))
    with keeping(found.golden, found.floor):
        yield found


def scaled(factor: float, row: int | None = None, seq: int = 0, step: int = 0) -> Spoil:
    """The rows of one pass, or one of them, times a factor."""

    def spoil(x: np.ndarray, at: Place) -> np.ndarray:
        x = x.copy()
        if (at.step, at.seq) == (step, seq):
            x[slice(None) if row is None else row] *= factor
        return x

    return spoil


def held(
    case: Case, base: Session, variant: Session, judged: bool, judge: Callable[[Session, Facts], RowJudge] = RowJudge.of
) -> AxisResult:  # fmt: skip
    facts = Facts.of(case.model_dir, "float32")
    judges = (judge(base, facts), judge(variant, facts)) if judged else None
    return Variants(RowSide(base), RowSide(variant), judges).compare("batch", "alone = in a batch")


def variant(case: Case, folder: Path, spoil: dict[str, Spoil]) -> Session:
    return synthetic(folder / "variant.session", case.floor, spoil=spoil)


@pytest.mark.slow
@pytest.mark.parametrize("judged", [True, False])
def test_equal_runs_are_equal(judged: bool, case: Case, tmp_path: Path) -> None:
    same = synthetic(tmp_path / "same.session", case.floor)
    found = held(case, same, variant(case, tmp_path, {}), judged)
    assert (found.verdict, found.rows, found.bugs, found.rounding) == ("equal", 21, (), ())


@pytest.mark.slow
@pytest.mark.parametrize("judged", [True, False])
def test_other_bits_are_rounding_with_their_size(judged: bool, case: Case, tmp_path: Path) -> None:
    other = variant(case, tmp_path, {"layers.1.attn.q_proj": scaled(1 + 2.0**-22, row=3)})
    found = held(case, synthetic(tmp_path / "base.session", case.floor), other, judged)
    assert found.verdict == "rounding"
    (one,) = found.rounding
    assert (one.operation, one.layers, one.own, one.rows, one.first) == ("attn.q_proj", (1,), 1, 21, (0, 3))
    assert one.roundings == pytest.approx(4, rel=0.5)  # 2**-22 of the row, in units of 2**-24


@pytest.mark.slow
@pytest.mark.parametrize(("judged", "side"), [(True, "variant"), (False, "unknown")])
def test_a_bug_is_found_behind_rounding(judged: bool, side: str, case: Case, tmp_path: Path) -> None:
    spoil = {"layers.0.attn.q_proj": scaled(1 + 2.0**-22), "layers.2.mlp.down": scaled(1.1, row=1, seq=1)}
    found = held(
        case, synthetic(tmp_path / "base.session", case.floor), variant(case, tmp_path, spoil), judged
    )
    assert found.verdict == "bug"
    one = found.bugs[0]
    assert (one.tap, one.first, one.requests, one.positions, one.side) == (
        "layers.2.mlp.down", (1, 1), (1,), (1,), side
    )  # fmt: skip
    assert one.error == pytest.approx(0.1, rel=0.01)
    assert [rounded.operation for rounded in found.rounding] == ["attn.q_proj"]


@pytest.mark.slow
def test_a_bug_smaller_than_what_rounding_gathers_is_judged_by_its_own_inputs(
    case: Case, tmp_path: Path
) -> None:
    spoil = {"layers.1.mlp.up": scaled(1 + 2e-5, row=4)}
    base, other = synthetic(tmp_path / "base.session", case.floor), variant(case, tmp_path, spoil)
    assert held(case, base, other, judged=False).verdict == "rounding"
    found = held(case, base, other, judged=True)
    assert (found.bugs[0].tap, found.bugs[0].first) == ("layers.1.mlp.up", (0, 4))
    swapped = held(case, other, base, judged=True)
    assert swapped.bugs[0].side == "base"


def test_what_is_wrong_alike_in_both_is_no_matter_of_the_axis(case: Case, tmp_path: Path) -> None:
    spoil = {"layers.1.mlp.up": scaled(1.5)}
    base = synthetic(tmp_path / "base.session", case.floor, spoil=spoil)
    assert held(case, base, variant(case, tmp_path, spoil), judged=True).verdict == "equal"
    worse = synthetic(tmp_path / "worse.session", case.floor, spoil={"layers.1.mlp.up": scaled(3.0)})
    found = held(case, base, worse, judged=True)
    assert (found.verdict, found.bugs[0].side) == ("bug", "both")


@pytest.mark.slow
def test_what_came_in_with_the_inputs_accuses_nobody(case: Case, tmp_path: Path) -> None:
    """Where an input differs far beyond rounding, an operation that gives what it should of it is right."""

    def from_input(x: np.ndarray, at: Place) -> np.ndarray:
        return x

    base = synthetic(tmp_path / "base.session", case.floor)
    other = variant(case, tmp_path, {"embed": scaled(1.5, row=2), "layers.0.attn_norm": from_input})
    found = held(case, base, other, judged=True)
    assert found.bugs[0].tap == "embed"
    assert "layers.1.attn.q_proj" not in {one.tap for one in found.bugs}


def test_runs_of_other_tokens_show_nothing(case: Case, tmp_path: Path) -> None:
    from dataclasses import replace

    base = synthetic(tmp_path / "base.session", case.floor)
    other = synthetic(
        tmp_path / "other.session", case.floor, change=lambda one: replace(one, ids=[9] * len(one.ids))
    )
    found = held(case, base, other, judged=True)
    assert (found.verdict, found.why) == ("inconclusive", "the two read no tokens in common")
