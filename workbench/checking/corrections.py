"""Corrections: every tap gets its golden value once it was recorded, so that each operation works on right inputs.

What a run under corrections records of a tap is then what the operation itself does wrong: its injected error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from lockstep.sessions import Session
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.layouts import rebuilt_shape
from lockstep.sessions.records import Tap
from lockstep.workbench.inferior.patches import Patch, cut

#: The corrections of a step.
Corrections = Callable[[int], Iterable[Patch]]
#: The shapes of a tap's tensors, by rank.
_Shapes = Mapping[int, tuple[int, ...]]


def corrections(
    plain: Session, golden: Session, step: int, wanted: Callable[[str], bool] = lambda tap: True
) -> Iterator[Patch]:
    """The patches of one step at the `wanted` taps, tap by tap as they are asked for. `plain` is the same run without
    them, every tensor whole; of it shapes alone are read.

    A tap that has no golden tensor (partial sums), or gives another shape than the golden one, stays as it is:
    what is computed from it is not on right inputs.
    """
    shapes: dict[tuple[str, int], dict[int, tuple[int, ...]]] = defaultdict(dict)
    for key in plain.captured(step):
        if not key.slice:
            shapes[key.tap, key.seq][key.rank] = key.shape
    seqs = [reported.seq for reported in plain.step(step).sequences]
    for tap in plain.taps:
        for seq in seqs if wanted(tap.name) and golden.has_tap(tap.name) else ():
            patch = _correction(tap, shapes[tap.name, seq], plain.ranks, golden, step, seq)
            if patch is not None:
                yield patch


def _correction(tap: Tap, held: _Shapes, ranks: int, golden: Session, step: int, seq: int) -> Patch | None:
    try:
        shape = rebuilt_shape(tap.layout, held, ranks)
    except LayoutError:
        return None
    right = None if shape is None else golden.rebuilt(tap.name, step=step, seq=seq, slice="").array
    if right is None or right.shape != shape:
        return None
    whole = tuple((0, length) for length in right.shape)
    shapes = [held[rank] for rank in range(ranks)]
    return Patch(tap.index, seq, step, cut(tap.layout, shapes, whole, right.astype(np.float32)), after=True)
