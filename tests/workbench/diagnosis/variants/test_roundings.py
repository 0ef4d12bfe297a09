"""Weights are rounded as libraries round them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.workbench.diagnosis.hypotheses.roundings import ROUNDINGS, WEIGHTS

pytestmark = pytest.mark.sampled_file(3)


@pytest.mark.parametrize("name", [*ROUNDINGS, *WEIGHTS])
@given(seed=st.integers(0, 99), size=st.floats(1e-3, 1e2))
def test_what_was_rounded_once_stays(name: str, seed: int, size: float) -> None:
    change = {**ROUNDINGS, **WEIGHTS}[name]
    x = np.random.default_rng(seed).normal(size=(4, 128)) * size
    once = change(x)
    assert once is not None
    assert once.shape == x.shape
    assert np.abs(once - x).max() <= 0.35 * np.abs(x).max()
    again = change(np.asarray(once))
    assert again is None or np.abs(again - once).max() <= 2e-3 * np.abs(once).max()


def test_numbers_of_nf4_are_the_nearest_of_its_levels() -> None:
    found = WEIGHTS["4-bit NormalFloat (NF4) in blocks of 64"](np.array([[1.0, -0.5, 0.35, 0.1] * 16]))
    assert found is not None
    assert found[0, :4].tolist() == pytest.approx(
        [1.0, -0.5250730514526367, 0.33791524171829224, 0.07958029955625534]
    )
