"""Where something wrong begins: at an operation whose output has it though nothing that it is computed from has.

`wrong[taps, ranks]` shows where a step has it: NaN, Inf, replicas that disagree. What an operation is computed from are
the taps of its step, on any rank (a sum over ranks hands NaN on), and for a cache its own rows of the step before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.flow import inputs_of, is_known, remembers
from lockstep.engine.taps.names import count_layers

Wrong = NDArray[np.bool_]


class DataFlow:
    """The inputs of each tap of a model, as places. Of a tap whose name gives nothing: the tap before it."""

    def __init__(self, names: Sequence[str]) -> None:
        index = {name: place for place, name in enumerate(names)}
        layers = count_layers(names)
        self.inputs: tuple[tuple[int, ...], ...] = tuple(
            tuple(index[one] for one in inputs_of(name, layers, index) if one in index)
            if is_known(name)
            else tuple(range(place))[-1:]
            for place, name in enumerate(names)
        )
        self._remembering = {place for place, name in enumerate(names) if remembers(name)}

    def begun(self, wrong: Wrong, before: Wrong | None, blind: Collection[int] = ()) -> Wrong:
        """Where it begins in a step, [taps, ranks]; `before` is the step before, where there is one. `blind` are places
        that cannot show it: they are as what they are computed from."""
        anywhere: NDArray[np.bool_] = np.any(wrong, axis=1)
        found = wrong.copy()
        for place in range(int(anywhere.argmax()), len(anywhere)) if anywhere.any() else ():
            inherited = any(anywhere[one] for one in self.inputs[place])
            if inherited:
                found[place] = False
                anywhere[place] |= place in blind
            elif before is not None and place in self._remembering:
                found[place] &= ~before[place]
        return found


@dataclass(frozen=True, slots=True)
class Beginning:
    """It begins at a place of a step, on a rank. `branch` is the one that ran the step."""

    branch: int
    step: int
    place: int
    rank: int


def carries(reported: set[Beginning], one: Beginning, before: Iterable[Beginning]) -> bool:
    """Whether `one` carries on what was reported. `before` is the same in the steps before it, newest first, as far as
    they have it without a gap. Those in between are reported with it."""
    passed = [one]
    for earlier in before:
        if earlier in reported:
            reported.update(passed)
            return True
        passed.append(earlier)
    return False
