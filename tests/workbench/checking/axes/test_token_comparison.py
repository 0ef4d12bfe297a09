"""A variant of which the tokens alone are seen: the recorded logits show whether another token is rounding or a bug."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import SequenceStep, Session
from lockstep.sessions.keeping import keeping
from lockstep.workbench.checking.axes.axis import AxisResult
from lockstep.workbench.checking.axes.token_comparison import compare_tokens
from lockstep.workbench.diagnosis.row_sides import RowSide
from tests.workbench.diagnosis.synthetic import Case, Place, synthetic, tiny_case

#: The sequence and the position of its first decoded token.
SEQ, AT = 1, 5


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    found = tiny_case(tmp_path_factory.mktemp("case"))
    with keeping(found.golden, found.floor):
        yield found


def emitted(case: Case) -> int:
    """What the reference reads there."""
    return next(one.ids[0] for one in case.floor.step(1).sequences if one.seq == SEQ)


def held(case: Case, folder: Path, token: int, raised: float = 0.0) -> AxisResult:
    """A run that reads `token` there, against one whose logits put it `raised` below the likeliest (0: as they are)."""

    def near(x: np.ndarray, at: Place) -> np.ndarray:
        x = x.copy()
        if (at.step, at.seq) == (0, SEQ) and raised:
            x[-1, token] = x[-1].max() - raised
        return x

    def change(one: SequenceStep) -> SequenceStep:
        return replace(one, ids=[token]) if (one.seq, one.positions[0]) == (SEQ, AT) else one

    base = synthetic(folder / "base.session", case.floor, spoil={"logits": near})
    variant = synthetic(folder / "variant.session", case.floor, change=change, skip=lambda tap: True)
    with keeping(base, variant):
        return compare_tokens("graph", "with graphs = eagerly", RowSide(base), RowSide(variant))


def test_the_same_tokens_are_equal_and_reported_as_no_more(case: Case, tmp_path: Path) -> None:
    found = held(case, tmp_path, emitted(case))
    assert (found.verdict, found.rows, found.taps) == ("equal", 21, 0)
    assert found.in_words() == "the same tokens in 21 rows"


def test_a_token_far_behind_the_likeliest_is_a_bug(case: Case, tmp_path: Path) -> None:
    found = held(case, tmp_path, (emitted(case) + 1) % 100)
    assert found.verdict == "bug"
    (token,) = found.tokens
    assert (token.first, token.chosen, token.side) == ((SEQ, AT), emitted(case), "variant")
    assert "more than rounding" in found.in_words()


def test_a_token_within_rounding_of_the_likeliest_accuses_nobody(case: Case, tmp_path: Path) -> None:
    found = held(case, tmp_path, (emitted(case) + 1) % 100, raised=1e-7)
    assert (found.verdict, found.tokens) == ("inconclusive", ())
    assert found.why.startswith(f"request {SEQ} goes on with another token at position {AT}")


def test_what_follows_a_sampled_token_accuses_nobody(case: Case, tmp_path: Path) -> None:
    """The recorded run reads there what its own logits did not choose."""

    def sampled(x: np.ndarray, at: Place) -> np.ndarray:
        x = x.copy()
        if (at.step, at.seq) == (0, SEQ):
            x[-1, 99] = x[-1].max() + 5
        return x

    def change(one: SequenceStep) -> SequenceStep:
        return replace(one, ids=[98]) if (one.seq, one.positions[0]) == (SEQ, AT) else one

    base: Session = synthetic(tmp_path / "base.session", case.floor, spoil={"logits": sampled})
    other = synthetic(tmp_path / "variant.session", case.floor, change=change, skip=lambda tap: True)
    with keeping(base, other):
        found = compare_tokens("graph", "with graphs = eagerly", RowSide(base), RowSide(other))
    assert (found.verdict, found.tokens) == ("inconclusive", ())
