"""Where an operation is wrong: properties that hold of every error, however it is spread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep.workbench.diagnosis.hypotheses.attention.softmaxes import powers
from lockstep.workbench.diagnosis.hypotheses.attention.tree import softmax
from lockstep.workbench.diagnosis.hypotheses.products.products import (
    product_coarse,
    product_fits,
    product_maps,
)
from lockstep.workbench.diagnosis.operations.deviation import Part, locate
from lockstep.workbench.diagnosis.operations.facts import LARGEST
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import ROWS, drawn, fits, made_site

N, HEADS, WIDTH = 12, 4, 8

#: Error of each element over its noise: none, within what rounding may do, about the limits, far beyond.
OVER = st.sampled_from([0.0, 1.0, 2.0, 2.6, 3.5, 11.0, 13.0, 1e4])


@given(
    token=arrays.arrays(float, N, elements=OVER),
    column=arrays.arrays(float, HEADS * WIDTH, elements=OVER),
    alone=st.tuples(st.integers(0, N - 1), st.integers(0, HEADS * WIDTH - 1), OVER),
)
def test_what_is_wrong_is_never_nothing(
    token: np.ndarray, column: np.ndarray, alone: tuple[int, int, float]
) -> None:
    """Heads, columns and rows that are wrong are so in common."""
    over = np.zeros((N, HEADS * WIDTH))
    over[:, :] = np.minimum(token[:, None], column[None, :])
    over[alone[:2]] = alone[2]
    right = np.ones_like(over)
    part = Part(ROWS[:N], {}, right + 1e-6 * over, right, np.full_like(over, 1e-6), LARGEST["float32"])
    found = locate([part], 0, None, WIDTH)
    if found is not None:
        assert found.scopes[0].any()
        assert {ROWS[i] for i in np.flatnonzero(found.scopes[0].any(1))} == set(found.rows)


def test_columns_that_are_wrong_outside_of_the_heads_that_are_are_not_told() -> None:
    """Of one head all is a little off, of another head one column: in no column are both."""
    over = np.full((N, HEADS * WIDTH), 0.1)
    over[:, :WIDTH] = 2.7  # together beyond noise, each column alone not
    over[:, WIDTH + 3] = 3.6  # the other way round
    right = np.ones_like(over)
    part = Part(ROWS[:N], {}, right + 1e-6 * over, right, np.full_like(over, 1e-6), LARGEST["float32"])
    found = locate([part], 0, None, WIDTH)
    assert found is not None
    assert found.heads == (0,)
    assert found.scopes[0][:, :WIDTH].all()
    assert not found.scopes[0][:, WIDTH:].any()


def linear(seen_of: Callable[[np.ndarray, np.ndarray], np.ndarray], width: int = 64) -> Site:
    x, w = drawn(np.random.default_rng(0), len(ROWS), width), drawn(np.random.default_rng(1), 96, width)
    weights = {"model.layers.1.mlp.gate_proj.weight": w}
    return made_site("linear", "layers.1.mlp.gate", {"x": x}, seen_of(x, w), weights=weights)


def test_in_features_that_count_a_trifle_more_are_reported() -> None:
    """No in feature by itself is off by a thousandth."""
    site = linear(lambda x, w: x @ (w * np.where(np.arange(64) < 32, 1.0006, 1.0004)).T)
    assert "feature_scale" in {one.variant.name for one in fits(site, [product_fits])}


def test_a_rank_without_in_features_gives_nothing() -> None:
    site = linear(lambda x, w: np.ones((len(x), 96)), width=0)
    assert site.deviation is not None
    banks = [product_fits, product_coarse, product_maps]
    assert [one.variant.name for one in fits(site, banks) if one.accepted] == ["constant_row"]


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
def test_what_has_no_elements_is_right(shape: tuple[int, int]) -> None:
    """The part of a rank that holds no out features, a pass without tokens."""
    part = Part((), {}, np.zeros(shape), np.zeros(shape), np.zeros(shape), LARGEST["float32"])
    assert locate([part], 0, None, 4) is None


@pytest.mark.parametrize("form", [softmax, powers])
def test_queries_without_keys_have_no_probabilities(form: Callable[[np.ndarray], np.ndarray]) -> None:
    assert form(np.zeros((4, 3, 0))).shape == (4, 3, 0)
