"""States of linear attention by sequence: what a pass has put aside, what earlier passes have left."""

from __future__ import annotations

import torch

from lockstep.engine.batch import SequenceSpan
from lockstep.engine.kv.states import LayerState, StatePool

NONE = torch.empty(0, dtype=torch.int64)


def state(value: float) -> LayerState:
    return LayerState(torch.full((3, 2), value), torch.full((1, 2, 2), value))


def written(pool: StatePool, seq: int, computed: int) -> SequenceSpan:
    """A pass of one sequence up to so many tokens, whose state is that number."""
    span = SequenceSpan(seq, 0, 1, computed, NONE, NONE, NONE, computed, computed, [0], True)
    pool.write(0, span, state(float(computed)))
    return span


def number(pool: StatePool, seq: int) -> float | None:
    found = pool.of(seq, 0)
    return None if found is None else float(found.heads[0, 0, 0])


def test_a_pass_that_is_broken_off_changes_nothing() -> None:
    pool = StatePool({0: state(0)})
    assert number(pool, 1) is None
    span = written(pool, 1, 5)
    assert span.held == [5]
    assert number(pool, 1) is None
    pool.abandon()
    pool.commit(1, 5)
    assert number(pool, 1) is None


def test_a_rewind_finds_the_newest_state_that_is_left() -> None:
    pool = StatePool({0: state(0)})
    for computed in (5, 6, 7):
        written(pool, 1, computed)
        pool.commit(1, computed)
    assert number(pool, 1) == 7
    assert pool.rewind(1, 6) == 6
    assert number(pool, 1) == 6
    assert pool.rewind(1, 4) == 0
    assert number(pool, 1) is None


def test_beyond_the_budget_ever_fewer_old_states_are_kept() -> None:
    pool = StatePool({0: state(0)}, kept_bytes=4 * state(0).nbytes)
    for computed in range(1, 40):
        written(pool, 1, computed)
        pool.commit(1, computed)
        assert number(pool, 1) == computed
    kept = [computed for computed in range(1, 40) if pool.rewind(1, 40 - computed) == 40 - computed]
    assert 1 <= len(kept) <= 5


def test_a_sequence_that_is_done_leaves_its_state_behind_but_not_to_the_next() -> None:
    pool = StatePool({0: state(0)})
    written(pool, 1, 5)
    pool.commit(1, 5)
    pool.remove(1)
    assert number(pool, 1) is None
    assert float(pool.last[0].heads[0, 0, 0]) == 5
