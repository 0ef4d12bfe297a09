"""Looking elsewhere, without a session."""

from __future__ import annotations

from lockstep.workbench.tui.navigator import clamped, next_rank, next_stop, same_operation
from lockstep.workbench.views.where import Where

_TAPS = ("embed", "layers.0.attn_norm", "layers.0.mlp", "layers.1.attn_norm", "layers.1.mlp", "logits")


def test_the_same_operation_of_a_neighbouring_layer() -> None:
    assert same_operation(_TAPS, Where(tap=1), 1).tap == 3
    assert same_operation(_TAPS, Where(tap=4), -1).tap == 2
    assert same_operation(_TAPS, Where(tap=4), 1).tap == 4, "there is no further layer"


def test_the_next_stop_is_the_nearest_one() -> None:
    assert next_stop([9, 4, 6], 5, -1) == 4
    assert next_stop([9, 4, 6], 5, 1) == 6
    assert next_stop([4], 5, 1) is None


def test_a_step_that_is_not_there_is_the_nearest_that_is() -> None:
    assert clamped(Where(step=9), range(2, 5)).step == 4
    assert clamped(Where(step=0), range(2, 5)).step == 2
    assert clamped(Where(step=7), range(0)).step == 7


def test_ranks_are_looked_at_one_by_one_then_all() -> None:
    where, seen = Where(), []
    for _ in range(3):
        where = next_rank(where, 2)
        seen.append(where.rank)
    assert seen == [0, 1, None]
