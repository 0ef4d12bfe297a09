"""Which of the rules in force make the engine wrong: the smallest set whose correct values restore the reference.

Delta debugging over runs of our own engine, after the evidence has spoken: this alone may look at rules, and it shows
only whether switching one off helps. The number of runs is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

#: Whether a run under these rules matches the reference.
Matches = Callable[[Mapping[str, str]], bool]

#: Runs of the engine that a search may take.
MOST_RUNS = 14


def smallest_restoring(rules: Mapping[str, str], matches: Matches) -> tuple[str, ...] | None:
    """Of `rules` (those that differ from correct) the smallest set that has to be put right for the run to match, none
    of which can be left out; as "NAME=VALUE". None where putting all of them right does not help, or the search is
    out of runs. `matches` is asked at most MOST_RUNS times."""
    runs = _Bounded(matches)
    try:
        if not rules or not runs({}):
            return None
        return tuple(f"{name}={rules[name]}" for name in _minimal(list(rules), rules, runs))
    except _OutOfRuns:
        return None


def _minimal(names: Sequence[str], rules: Mapping[str, str], matches: Matches) -> list[str]:
    """Zeller's ddmin over what is put right: parts of it are left wrong as long as the run matches all the same."""
    wanted, parts = list(names), 2
    while len(wanted) > 1:
        size = -(-len(wanted) // parts)
        chunks = [wanted[i : i + size] for i in range(0, len(wanted), size)]
        for chunk in chunks:
            rest = [name for name in wanted if name not in chunk]
            if matches({name: value for name, value in rules.items() if name not in rest}):
                wanted, parts = rest, max(2, parts - 1)
                break
        else:
            if parts >= len(wanted):
                break
            parts = min(len(wanted), 2 * parts)
    return wanted


class _OutOfRuns(Exception):
    """The search has taken as many runs as it may."""


class _Bounded:
    """Asks no set of rules twice, and no more than MOST_RUNS in all."""

    def __init__(self, matches: Matches) -> None:
        self._matches = matches
        self._known: dict[frozenset[tuple[str, str]], bool] = {}

    def __call__(self, rules: Mapping[str, str]) -> bool:
        key = frozenset(rules.items())
        if key not in self._known:
            if len(self._known) >= MOST_RUNS:
                raise _OutOfRuns
            self._known[key] = self._matches(rules)
        return self._known[key]
