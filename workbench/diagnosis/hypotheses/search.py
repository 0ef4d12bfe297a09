"""The search among edits: each is screened on the sample, what explains something of it is ranked, and where none
explains all of it the best are tried two by two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.solve import Solved, solve
from lockstep.workbench.diagnosis.hypotheses.trial import Tried
from lockstep.workbench.diagnosis.variants.variant import PARTLY

#: Edits of which all pairs are tried.
PAIRED = 24
#: A pair is worth telling if it leaves less than this share of what its better half does.
_BETTER = 0.5
#: Two hypotheses whose predictions are that near, over the error, are the same numbers.
_SAME = 1e-9


def single(tried: Tried, edits: Iterable[Edit]) -> list[Solved]:
    """All edits that explain something of the sample, what leaves least first."""
    found = [one for one in _screened(tried, edits) if one.left <= PARTLY]
    return _distinct(tried, found)


def pairs(tried: Tried, edits: Iterable[Edit]) -> list[Solved]:
    """Two edits at once that leave less than half of what either does, of those that leave least by themselves."""
    best = sorted(_screened(tried, edits), key=lambda one: one.left)[:PAIRED]
    found = []
    for one, other in combinations(best, 2):
        both = _solved(tried, (*one.open, *other.open), (*one.numbers, *other.numbers))
        if both is not None and both.left <= _BETTER * min(one.left, other.left, PARTLY):
            found.append(both)
    return _distinct(tried, found)


def _screened(tried: Tried, edits: Iterable[Edit]) -> Iterator[Solved]:
    for edit in edits:
        found = _solved(tried, (edit,))
        if found is not None:
            yield found


def _solved(tried: Tried, edits: Sequence[Edit], near: Sequence[float] = ()) -> Solved | None:
    try:
        return solve(tried, edits, near)
    except IndexError:  # the formula has no such place
        return None


def _distinct(tried: Tried, found: Sequence[Solved]) -> list[Solved]:
    """What leaves least first; of those that predict the same numbers the shortest, of these the first."""
    kept: list[Solved] = []
    for one in sorted(found, key=lambda one: one.cost):
        if not any(np.linalg.norm(one.rest - other.rest) <= _SAME * tried.error for other in kept):
            kept.append(one)
    return sorted(kept, key=lambda one: one.left)
