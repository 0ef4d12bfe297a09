"""Fitting numbers to what was seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.workbench.diagnosis.hypotheses.fits import GivenBefore, coefficients, finite, least_squares

_NUMBERS = st.sampled_from([0.0, 1e-13, 2e-12, 1.0, 1.0 + 5e-8, 1.0 + 3e-7, -1.0, 1e30, np.inf, np.nan])


def test_the_multiples_of_terms_are_found() -> None:
    chance = np.random.default_rng(0)
    terms = [chance.standard_normal((5, 7)) for _ in range(3)]
    assert coefficients(2 * terms[0] - 0.5 * terms[2], terms) == pytest.approx([2, 0, -0.5])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_at_once(odd: float) -> None:
    """LAPACK was seen to iterate for ever."""
    columns, seen = np.ones((6, 2)), np.ones(6)
    columns[3, 1] = odd
    for call in (
        lambda: least_squares(columns, seen),
        lambda: least_squares(columns.T, columns[3]),
        lambda: finite(columns),
    ):
        with pytest.raises(np.linalg.LinAlgError, match="NaN or infinities"):
            call()


@given(st.lists(st.lists(_NUMBERS, min_size=3, max_size=3), min_size=1, max_size=8))
def test_what_was_given_before_is_what_numpy_takes_for_close(given_in_turn: list[list[float]]) -> None:
    given_before, known = GivenBefore(), list[np.ndarray]()
    for one in given_in_turn:
        flat = np.nan_to_num(np.array(one))
        with np.errstate(over="ignore"):
            expected = any(np.allclose(flat, other, rtol=1e-7, atol=1e-12) for other in known)
        assert given_before([np.array(one[:2]), np.array(one[2:])]) == expected
        if not expected:
            known.append(flat)
