"""Which branch recorded a step, for few branches and for many."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.sessions import Branch, Session, SessionError
from lockstep.sessions.history import BranchHistory
from tests.sessions.hostile_files import make

CHAIN = 20_000


def test_a_long_chain_of_forks_is_read_in_linear_time(tmp_path: Path) -> None:
    """It took minutes: every branch had a list of all its ancestors."""
    with Session.open(make("chained branches", tmp_path / "a.session")) as session:
        assert len(session.branches()) == CHAIN
        assert [session.steps(n) for n in (0, 1, CHAIN - 1)] == [range(1), range(2), range(CHAIN)]
        assert [session.owner(step, CHAIN - 1) for step in range(CHAIN)] == list(range(CHAIN))
        assert session.own_steps(7) == range(7, 8)


def test_a_branch_inherits_only_what_was_before_its_fork() -> None:
    """2 leaves 1 before 1's own steps: it has none of them; 3 leaves 2 inside its own."""
    history = BranchHistory(
        [
            Branch(0, "main", None, 0),
            Branch(1, "a", 0, 3),
            Branch(2, "b", 1, 2),
            Branch(3, "c", 2, 4),
            Branch(4, "empty", 1, 5),
        ],
        [(0, 0, 4, 5), (1, 3, 6, 4), (2, 2, 5, 4), (3, 4, 4, 1)],
    )
    assert history.segments(1) == [(0, 0, 3), (1, 3, 7)]
    assert history.segments(2) == [(0, 0, 2), (2, 2, 6)]
    assert history.segments(3) == [(0, 0, 2), (2, 2, 4), (3, 4, 5)]
    assert history.segments(4) == [(0, 0, 3), (1, 3, 5)]
    assert [history.steps(n).stop for n in range(5)] == [5, 7, 6, 5, 5]


@pytest.mark.parametrize(
    "branch",
    [
        Branch(1, "its parent comes later", 2, 1),
        Branch(1, "forks after its parent's end", 0, 3),
        Branch(1, "forks before the first step", 0, -1),
        Branch(1, "has no parent but a fork", None, 1),
        Branch(1, "is its own parent", 1, 0),
    ],
)
def test_an_impossible_branch_is_refused(branch: Branch) -> None:
    with pytest.raises(SessionError, match="branch 1"):
        BranchHistory([Branch(0, "main", None, 0), branch], [(0, 0, 1, 2)])
