"""Keys and values that are solved for from contexts."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.workbench.diagnosis.hypotheses.attention.tree import softmax
from lockstep.workbench.diagnosis.variants.caches.foreign_inside import _Contexts, _shows, _solved

QUERIES, KEYS, DIM, SCALE = 24, 6, 4, 0.5


def contexts(hidden: int) -> tuple[_Contexts, np.ndarray, np.ndarray]:
    """Of queries that do not see the first keys, where the first two rows hold others than were written; those."""
    draw = np.random.default_rng(7)
    queries, keys, values = (draw.standard_normal((rows, DIM)) for rows in (QUERIES, KEYS, KEYS))
    others = draw.standard_normal((2, 2, DIM))
    held = [np.concatenate([other, x[2:]]) for other, x in zip(others, (keys, values), strict=True)]
    allowed = np.broadcast_to(np.arange(KEYS) >= hidden, (QUERIES, KEYS))
    seen = softmax(np.where(allowed, SCALE * queries @ held[0].T, -np.inf)) @ held[1]
    noise = np.full(seen.shape, 1e-9)
    wrong = allowed[:, :2].any(1)
    return _Contexts(queries, allowed, wrong, seen, noise, keys, values), others[0], others[1]


def test_rows_are_found_from_what_is_made_of_them() -> None:
    of, keys, values = contexts(0)
    found = _solved(of, range(2), SCALE)
    assert found is not None
    solved, held = np.concatenate(found, 1), np.concatenate([keys, values], 1)
    in_order = (x[np.argsort(x[:, 0])] for x in (solved, held))  # whichever row is which: a sum has no order
    np.testing.assert_allclose(*in_order, atol=1e-5)


@pytest.mark.parametrize("hidden", [2, 4])
def test_rows_that_no_query_attends_to_explain_nothing(hidden: int) -> None:
    of, *_ = contexts(hidden)
    assert _solved(of, range(2), SCALE) is None


def test_rows_are_looked_for_where_what_sees_them_is_wrong_and_nothing_else() -> None:
    of, *_ = contexts(0)
    assert _shows(of, range(2))
    of.wrong[2:] = False
    assert not _shows(of, range(2)), "most of what sees them is right"
    later, *_ = contexts(4)
    later.wrong[:] = True
    assert not _shows(later, range(2)), "what is wrong does not see them"
