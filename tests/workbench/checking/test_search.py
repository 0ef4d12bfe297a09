"""The search over rules: the smallest set that restores the reference, in a bounded number of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from lockstep.workbench.checking.search import MOST_RUNS, smallest_restoring


class Engine:
    """Wrong while any of some rules is in force."""

    def __init__(self, *wrong: str, also: Callable[[Mapping[str, str]], bool] = lambda rules: False) -> None:
        self.wrong, self.also, self.runs = set(wrong), also, 0

    def matches(self, rules: Mapping[str, str]) -> bool:
        self.runs += 1
        return not self.wrong & rules.keys() and not self.also(rules)


def rules(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "off")


@pytest.mark.parametrize(
    "wrong", [("a",), ("d",), ("a", "b"), ("a", "d"), ("b", "c", "d"), ("a", "b", "c", "d")]
)
def test_exactly_the_rules_that_matter_are_named(wrong: tuple[str, ...]) -> None:
    engine = Engine(*wrong)
    found = smallest_restoring(rules("a", "b", "c", "d"), engine.matches)
    assert found is not None
    assert set(found) == {f"{name}=off" for name in wrong}
    assert engine.runs <= MOST_RUNS


def test_one_rule_takes_one_run() -> None:
    engine = Engine("a")
    assert smallest_restoring(rules("a"), engine.matches) == ("a=off",)
    assert engine.runs == 1


def test_what_no_rule_explains_is_reported_as_none() -> None:
    assert smallest_restoring(rules("a", "b"), lambda kept: False) is None
    assert smallest_restoring({}, lambda kept: True) is None


def test_runs_are_bounded() -> None:
    engine = Engine(also=lambda kept: len(kept) > 0)  # every rule matters
    assert smallest_restoring(rules(*map(str, range(40))), engine.matches) is None
    assert engine.runs <= MOST_RUNS
