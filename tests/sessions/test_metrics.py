"""Metrics against plain formulas on Python floats and exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.sessions.metrics import coarser, metrics

VALUES = st.floats(-(2.0**50), 2.0**50, width=32)
PAIRS = hnp.array_shapes(max_dims=3, max_side=4).flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float32, shape, elements=VALUES), hnp.arrays(np.float32, shape, elements=VALUES)
    )
)


@given(PAIRS)
def test_finite_tensors_against_exact_arithmetic(pair: tuple[np.ndarray, np.ndarray]) -> None:
    found = metrics(*pair)
    a, b = ([Fraction(float(x)) for x in side.reshape(-1)] for side in pair)
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    assert found.max_abs == float(max(differences))
    assert abs(float(pair[0][found.where]) - float(pair[1][found.where])) == found.max_abs
    norms = [math.sqrt(sum(x * x for x in side)) for side in (a, b, differences)]
    if norms[1] > 0:
        assert found.rel_l2 == pytest.approx(norms[2] / norms[1], rel=1e-9)
        assert found.scale == pytest.approx(norms[1] / math.sqrt(len(b)), rel=1e-9)
    if norms[0] > 0 and norms[1] > 0:
        dot = float(sum(x * y for x, y in zip(a, b, strict=True)) / Fraction(norms[0]) / Fraction(norms[1]))
        assert found.cosine == pytest.approx(dot, abs=1e-9)
    assert found.equal == (a == b)


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 23), ("bfloat16", 7), ("float16", 10)])
@given(value=st.floats(2**-10, 2**10), steps=st.integers(0, 100), sign=st.sampled_from([1, -1]))
def test_ulp_counts_steps_of_the_dtype(dtype: str, bits: int, value: float, steps: int, sign: int) -> None:
    ulp = math.ldexp(1.0, math.frexp(value)[1] - 1 - bits)
    golden = sign * np.array([math.floor(value / ulp) * ulp])
    assert metrics(golden + steps * ulp, golden, dtype).max_ulp == steps


def test_an_ulp_near_zero_means_nothing() -> None:
    golden = np.array([1.0, 1e-20], np.float32)
    assert metrics(golden + np.array([0, 1e-12], np.float32), golden).max_ulp == 0.0
    assert metrics(np.array([3.0]), np.array([0.0])).rel_l2 == math.inf
    assert metrics(np.array([3.0]), np.array([0.0])).cosine == 0.0
    assert metrics(np.zeros(3), np.zeros(3)) == metrics(-np.zeros(3), np.zeros(3))


def test_equal_masks_are_no_difference() -> None:
    row = np.array([[1.0, -np.inf], [np.nan, 2.0]], np.float32)
    same = metrics(row, row.copy())
    assert same.equal
    assert (same.max_abs, same.rel_l2, same.mismatched) == (0.0, 0.0, 0)
    assert (same.nan_engine, same.nan_golden, same.inf_engine, same.inf_golden) == (1, 1, 1, 1)
    off = metrics(row + np.float32([[0.5, 0], [0, 0]]), row)
    assert (off.max_abs, off.where) == (0.5, (0, 0))
    assert off.rel_l2 == pytest.approx(0.5 / math.sqrt(5))


@pytest.mark.parametrize(
    ("engine", "golden"), [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (np.inf, -np.inf), (np.nan, np.inf)]
)
def test_one_element_finite_on_one_side_only_is_infinitely_far(engine: float, golden: float) -> None:
    a, b = np.ones((2, 3)), np.ones((2, 3))
    a[1, 2], b[1, 2] = engine, golden
    found = metrics(a, b)
    assert (found.max_abs, found.rel_l2, found.max_ulp, found.mismatched) == (math.inf, math.inf, math.inf, 1)
    assert found.where == (1, 2)
    assert math.isnan(found.cosine)
    assert not found.equal


def test_shapes_that_differ_are_reported_and_not_broadcast() -> None:
    found = metrics(np.ones((2, 1)), np.ones((2, 3)))
    assert found.shapes == ((2, 1), (2, 3))
    assert not found.equal
    assert metrics(np.ones((0, 3)), np.ones((0, 3))).equal


def test_the_coarser_type_rules() -> None:
    assert coarser("float32", "bfloat16") == "bfloat16"
    assert coarser("float16", "float32") == "float16"
    assert coarser("int64", "float64") == "float32"


def test_large_values_do_not_overflow() -> None:
    huge = np.full(1000, 3e38, np.float32)
    found = metrics(huge, -huge)
    assert found.cosine == pytest.approx(-1)
    assert found.rel_l2 == pytest.approx(2)
