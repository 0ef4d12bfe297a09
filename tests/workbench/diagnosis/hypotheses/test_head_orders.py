"""Orders of heads, by name."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.workbench.diagnosis.hypotheses.head_orders import by_columns, groups_of, interleaved, orders


@given(groups=st.integers(2, 6), each=st.integers(2, 6))
def test_interleaved_heads_are_counted_again(groups: int, each: int) -> None:
    order = interleaved(groups * each, groups)
    assert sorted(order.tolist()) == list(range(groups * each))
    assert order[:groups].tolist() == [group * each for group in range(groups)]
    assert groups_of(order) == groups
    assert groups_of(np.argsort(order)) == each


def test_no_order_of_heads_is_their_own() -> None:
    for heads in range(2, 13):
        named = dict(orders(heads))
        assert not any(np.array_equal(order, np.arange(heads)) for order in named.values())
        assert groups_of(np.arange(heads)) == 0


def test_columns_go_with_their_head() -> None:
    x = np.arange(12)
    assert x[by_columns(np.array([2, 0, 1]), 4)].tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
