"""The search among edits: each is screened on the sample, what explains something of it is ranked, and where none
explains all of it the best are tried two by two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.solve import Solved, solve
from lockstep.workbench.diagnosis.hypotheses.trial import Tried
from lockstep.workbench.diagnosis.hypotheses.variant import PARTLY

#: Edits to each of which every other is added; those to which others with numbers to solve for are.
FIRST, FIRST_SOLVED = 6, 3
#: The first of a pair leaves at most this share of the error.
_HELPFUL = 0.95
#: A pair is worth reporting if it leaves less than this share of what its better half does.
_BETTER = 0.5
#: Of such the later one is reported if it leaves less than this share of what the earlier one does.
_NEARER = 0.98
#: At the numbers that each has alone a pair has to leave less than this share for others to be looked for.
_PROMISING = 0.9
#: Two hypotheses whose predictions are that near, over the error or the noise, are the same numbers.
_SAME, _SAME_IN_NOISE = 1e-9, 0.05


def single(tried: Tried, edits: Iterable[Edit]) -> list[Solved]:
    """All edits that explain something of the sample, what leaves least first."""
    found = [one for one in _screened(tried, edits) if one.left <= PARTLY]
    return distinct(tried, found)


def pairs(tried: Tried, edits: Iterable[Edit]) -> list[Solved]:
    """Two edits at once that leave less than half of what either does: one of those that leave least by themselves, or
    something left out, which may leave more by itself, and any other."""
    alone = sorted(_screened(tried, edits), key=lambda one: one.left)
    firsts = distinct(tried, [one for one in alone if one.left < _HELPFUL])[:FIRST]
    firsts += [one for one in alone if one.edits[0].kind == "left_out" and one not in firsts]
    found = []
    for i, one in enumerate(firsts):
        for other in alone:
            if other.numbers and i >= FIRST_SOLVED:
                continue  # to solve for two numbers costs more
            alone_left = min(one.left, other.left, PARTLY)
            numbers = (*one.numbers, *other.numbers)
            both = _solved(tried, (*one.open, *other.open), numbers, _PROMISING * alone_left)
            if both is not None and both.left <= _BETTER * alone_left:
                found.append(both)
    return distinct(tried, found)


def _screened(tried: Tried, edits: Iterable[Edit]) -> Iterator[Solved]:
    for edit in edits:
        found = _solved(tried, (edit,))
        if found is not None:
            yield found


def _solved(
    tried: Tried, edits: Sequence[Edit], near: Sequence[float] = (), enough: float = math.inf
) -> Solved | None:
    try:
        return solve(tried, edits, near, enough)
    except IndexError:  # the formula has no such place
        return None


def distinct(tried: Tried, found: Sequence[Solved]) -> list[Solved]:
    """What leaves least first; of those that predict the same numbers the shortest, of these the nearest, else the
    first."""
    same = max(_SAME * tried.error, _SAME_IN_NOISE * tried.noise)
    kept: list[Solved] = []
    for one in sorted(found, key=lambda one: one.cost):
        at = next((i for i, other in enumerate(kept) if np.linalg.norm(one.rest - other.rest) <= same), None)
        if at is None:
            kept.append(one)
        elif one.cost == kept[at].cost and one.left < _NEARER * kept[at].left:
            kept[at] = one
    return sorted(kept, key=lambda one: one.left)
