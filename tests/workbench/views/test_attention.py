"""The figures of a row of attention: the same for pane, report and command."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.workbench.views.attention import row_figures


def test_hidden_keys_count_as_nothing() -> None:
    found = row_figures(np.array([0.5, 0.5, -np.inf], np.float32))
    assert (found.total, found.keys, found.attended, found.strongest) == (1.0, 2, 2, 0)
    assert found.entropy == pytest.approx(math.log(2))


def test_a_certain_row_has_an_entropy_of_zero_without_a_sign() -> None:
    assert math.copysign(1, row_figures(np.array([1.0, 0.0])).entropy) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_has_no_entropy(bad: float) -> None:
    found = row_figures(np.array([bad, 0.5]))
    assert not math.isfinite(found.total)
    assert math.isnan(found.entropy)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_of_a_row_that_is_not_finite_nothing_is_the_strongest(value: float) -> None:
    found = row_figures(np.array([0.25, value, 0.5], np.float32))
    assert (found.keys, found.strongest) == (None, None)
    assert math.isnan(found.entropy)
