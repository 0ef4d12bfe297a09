"""Turns of long tables: each has a share of every table, and together they have all."""

from __future__ import annotations

from tests.turns import TURNS, left_out

CASES = [
    f"tests/test_{table}.py::test_it[{case}]" for table in (1, 2, 3, 4, 8, 12, 112) for case in range(table)
]
CASES.append("tests/test_alone.py::test_it")


def test_all_turns_have_every_case() -> None:
    assert set.intersection(*(left_out(CASES, turn) for turn in range(TURNS))) == set()


def test_a_turn_has_a_share_of_each_table() -> None:
    of_the_longest = []
    for turn in range(TURNS):
        kept = set(CASES) - left_out(CASES, turn)
        *counts, longest = [sum(f"test_{table}.py" in case for case in kept) for table in (1, 2, 3, 4, 8, 12)]
        assert counts == [1, 1, 1 + (turn % 2 == 0), 2, 1]
        of_the_longest.append(longest)
        assert CASES[-1] in kept
    assert of_the_longest == [2, 2, 2, 2, 1, 1, 1, 1]


def test_a_turn_is_not_in_step_with_an_axis() -> None:
    kept = set(CASES) - left_out(CASES, 0)
    of_long = sorted(int(case.partition("[")[2].removesuffix("]")) for case in kept if "test_112.py" in case)
    assert {one % 2 for one in of_long} == {0, 1}
    assert {one % 4 for one in of_long} == {0, 1, 2, 3}
