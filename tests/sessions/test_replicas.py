"""Which ranks must hold the same bits, and who does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.sessions.layouts import agree
from lockstep.sessions.replicas import Replicas, replica_groups


@pytest.mark.parametrize(
    ("layout", "ranks", "groups"),
    [
        ("replicate", 4, [range(4)]),
        ("replicate", 1, []),
        ("partial", 4, []),
        ("shard(1)", 4, []),
        ("shard(1,replicas=2)", 4, [range(2), range(2, 4)]),
        ("shard(1,replicas=4)", 4, [range(4)]),
        ("shard(1,replicas=3)", 4, []),  # a stranger's layout that does not fit
    ],
)
def test_groups(layout: str, ranks: int, groups: list[range]) -> None:
    assert replica_groups(layout, ranks) == groups


def test_disagreement_names_the_odd_ranks_of_each_group() -> None:
    replicas = Replicas(["replicate", "shard(0,replicas=2)", "shard(0)", "partial"], 4)
    equal = np.array([[7] * 4, [1, 1, 2, 2], [1, 2, 3, 4], [1, 2, 3, 4]], np.uint64)
    assert replicas.disagreeing(equal) == {}
    assert replicas.first_disagreeing(equal) is None
    wrong = equal.copy()
    wrong[0] = [7, 7, 9, 7]
    wrong[1] = [1, 1, 2, 5]
    assert replicas.disagreeing(wrong) == {0: (2,), 1: (3,)}
    assert replicas.first_disagreeing(wrong) == (0, (2,))
    wrong[0] = [8, 7, 7, 7]  # the majority speaks, not rank 0
    assert replicas.first_disagreeing(wrong) == (0, (0,))
    wrong[0] = [9, 7, 7, 9]  # on a tie the lowest rank does
    assert replicas.first_disagreeing(wrong) == (0, (1, 2))


@given(sums=hnp.arrays(np.uint64, (1, 5), elements=st.integers(0, 2)))
def test_checksums_agree_with_arrays(sums: np.ndarray) -> None:
    """The rule is that of `layouts.agree`, which compares whole arrays."""
    _, odd = agree({rank: sums[0, rank : rank + 1] for rank in range(5)})
    assert Replicas(["replicate"], 5).disagreeing(sums) == ({0: tuple(odd)} if odd else {})
