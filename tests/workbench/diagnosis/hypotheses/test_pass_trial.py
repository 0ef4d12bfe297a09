"""Formulas tried on an operation with a part for each pass: what they leave, and how little of it is evaluated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from lockstep.engine.graph.formula import Node
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, apply
from lockstep.workbench.diagnosis.hypotheses.pass_trial import PassTrial
from lockstep.workbench.diagnosis.hypotheses.solve import solve
from lockstep.workbench.diagnosis.operations.site import Site

PLAIN = Node("multiply", (Node("q"), Node("k")))
KEYS = 8


def trial(queries: tuple[int, ...], wrong: tuple[int, ...], formula: Node, change: Any) -> PassTrial:
    """Passes of q [T, 1, K] times k [K], of which some were changed."""
    random, parts, scopes, given = np.random.default_rng(0), [], [], []
    for i, count in enumerate(queries):
        leaves = {"q": random.normal(size=(count, 1, KEYS)), "k": random.normal(size=KEYS)}
        expected = leaves["q"] * leaves["k"]
        seen = change(expected) if i in wrong else expected
        parts.append(
            SimpleNamespace(
                rows=range(count), seen=seen, expected=expected, noise=np.full(expected.shape, 1e-6)
            )
        )
        scopes.append(np.full(expected.shape, i in wrong))
        given.append(leaves)
    site = SimpleNamespace(parts=parts, deviation=SimpleNamespace(scopes=scopes), token_axis=0)
    return PassTrial(cast(Site, site), formula, given, ("q",))


def test_the_right_formula_leaves_all_of_the_error_and_the_wrong_one_nothing() -> None:
    tried = trial((5, 1, 1), (0, 2), PLAIN, lambda x: 3 * x)
    rest = tried.rest(PLAIN, {})
    assert rest is not None
    assert rest.shape == (6 * KEYS,)
    assert np.isclose(np.linalg.norm(rest), tried.error)
    edit = Edit((0,), "applied", ("scaled", 3.0))
    left = tried.rest(apply(edit, PLAIN), {})
    assert left is not None
    assert np.abs(left).max() < 1e-12
    assert [x.shape[0] for x in tried.whole([edit])] == [5, 1, 1]
    solved = solve(tried, [Edit((1,), "applied", ("scaled", None))])
    assert solved is not None
    assert solved.edits == (Edit((1,), "applied", ("scaled", 3.0)),)


def test_an_element_that_is_hidden_on_one_side_alone_is_far_from_right() -> None:
    tried = trial((4,), (0,), PLAIN, lambda x: np.where(np.arange(KEYS) == 0, -np.inf, x))
    rest = tried.rest(PLAIN, {})
    assert rest is not None
    assert np.count_nonzero(rest) == 4
    assert np.isfinite(tried.error)
    assert tried.error > 2 * np.abs(tried.site.parts[0].expected).max()


def test_a_sample_of_a_long_pass_is_evaluated() -> None:
    tried = trial((4000,), (0,), PLAIN, np.negative)
    value = tried.value(PLAIN)
    assert value is not None
    assert value.size <= 1 << 13
    assert tried.rest(Node("multiply", (Node("k"), Node("k"))), {}) is None  # of another shape
