"""Where two runs part, on numbers made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.workbench.checking.invariants.runs import Run, first_apart


class _Rows(Run):
    """A run of which the rows are known."""

    def __init__(self, rows: dict[str, np.ndarray]) -> None:
        kept = {tap: dict(enumerate(np.asarray(held, dtype=float))) for tap, held in rows.items()}
        super().__init__((), 0, (), (), kept)

    @property
    def taps(self) -> list[str]:
        return list(self._rows)


ROWS = np.arange(1.0, 13.0).reshape(4, 3)


@pytest.mark.parametrize(
    ("changed", "below", "expected"),
    [
        (ROWS, None, None),
        (ROWS * (1 + 1e-9), None, None),
        (ROWS + np.eye(4, 3, -2), None, ("b", 2)),
        (ROWS + np.eye(4, 3, -2), 2, None),
        (np.where(ROWS == 11, np.nan, ROWS), None, ("b", 3)),
    ],
)
def test_the_first_row_that_differs_is_reported(
    changed: np.ndarray, below: int | None, expected: tuple[str, int] | None
) -> None:
    apart = first_apart(_Rows({"a": ROWS, "b": ROWS}), _Rows({"a": ROWS, "b": changed}), 1e-6, below)
    assert (None if apart is None else (apart.tap, apart.index)) == expected


def test_nan_in_the_same_places_and_rows_that_one_lacks_are_no_difference() -> None:
    odd = np.where(ROWS == 5, np.nan, ROWS)
    assert first_apart(_Rows({"a": odd}), _Rows({"a": odd}), 1e-6) is None
    assert first_apart(_Rows({"a": ROWS}), _Rows({"a": ROWS[:2], "b": ROWS}), 1e-6) is None


def test_another_shape_is_a_difference() -> None:
    apart = first_apart(_Rows({"a": ROWS}), _Rows({"a": np.ones((4, 2))}), 1e-6)
    assert apart is not None
    assert math.isnan(apart.error)
    assert apart.in_words() == "a, token 0: of another shape"


def test_a_row_near_zero_is_measured_by_the_usual_row() -> None:
    quiet, noisy = ROWS.copy(), ROWS.copy()
    quiet[1], noisy[1] = 0.0, 1e-7
    assert first_apart(_Rows({"a": quiet}), _Rows({"a": noisy}), 1e-6) is None
