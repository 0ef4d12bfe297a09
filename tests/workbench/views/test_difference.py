"""Ours less theirs: what is the same differs by nothing, and a key that one side alone hides is seen."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.workbench.views.difference import hidden_by_one, hides, less

INF, NAN = np.inf, np.nan
SCORES, PROBS, OTHER = "layers.0.attn.scores", "layers.3.attn.probs", "layers.0.attn.q_proj"


def _row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize("tap", [SCORES, PROBS, OTHER])
def test_finite_numbers_are_subtracted(tap: str) -> None:
    random = np.random.default_rng(3)
    ours, theirs = (random.normal(0, 9, (2, 5, 5)).astype(np.float32) for _ in range(2))
    np.testing.assert_allclose(
        less(ours, theirs, tap), ours.astype(np.float64) - theirs, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("tap", [SCORES, PROBS, OTHER])
def test_nan_and_infinity_on_both_sides_differ_by_nothing(tap: str) -> None:
    same = _row(NAN, INF, 2.5)
    np.testing.assert_array_equal(less(same, same, tap), [0, 0, 0])
    np.testing.assert_array_equal(less(_row(NAN, 1), _row(1, NAN), tap), [NAN, NAN])


def test_a_value_of_minus_infinity_is_one_where_no_mask_hides() -> None:
    assert not hides(OTHER)
    np.testing.assert_array_equal(
        less(_row(-INF, -INF, 1, INF), _row(-INF, 1, -INF, -INF), OTHER), [0, -INF, INF, INF]
    )


@pytest.mark.parametrize("tap", [SCORES, PROBS])
def test_what_both_sides_hide_is_hidden(tap: str) -> None:
    assert hides(tap)
    np.testing.assert_array_equal(less(_row(-INF, 1), _row(-INF, 1), tap), [-INF, 0])


def test_a_score_that_one_side_alone_hides_is_never_drawn_as_nothing_or_as_a_number() -> None:
    ours, theirs = _row(-INF, 3.5, -INF, 0), _row(3.5, -INF, 0, -INF)
    np.testing.assert_array_equal(less(ours, theirs, SCORES), [INF] * 4)
    assert hidden_by_one(ours, theirs, SCORES) == (2, 2)
    assert hidden_by_one(_row(-INF, 1), _row(-INF, 1), SCORES) == (0, 0)


def test_a_probability_that_one_side_hides_is_none_there() -> None:
    ours, theirs = _row(-INF, 0.25, -INF, 0, -INF), _row(0.25, -INF, 0, -INF, NAN)
    np.testing.assert_array_equal(less(ours, theirs, PROBS), [-0.25, 0.25, 0, 0, NAN])
    assert hidden_by_one(ours, theirs, PROBS) == (0, 0)
