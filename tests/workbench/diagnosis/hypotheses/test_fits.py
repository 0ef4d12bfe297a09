"""Fitting numbers to what was seen."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.workbench.diagnosis.hypotheses.fits import coefficients, finite, least_squares


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
