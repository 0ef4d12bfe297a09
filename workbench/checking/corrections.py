"""Corrections: every tap gets its golden value once it was recorded, so that each operation works on right inputs.

What a run under corrections records of a tap is then what the operation itself does wrong: its injected error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from lockstep.sessions import Session
from lockstep.sessions.errors import LayoutError
from lockstep.workbench.inferior.patches import Patch, cut

#: The corrections of a step.
Corrections = Callable[[int], Iterable[Patch]]


def corrections(
    plain: Session, golden: Session, step: int, wanted: Callable[[str], bool] = lambda tap: True
) -> Iterator[Patch]:
    """The patches of one step at the `wanted` taps, tap by tap as they are asked for. `plain` is the same run without
    them, every tensor whole.

    A tap that has no golden tensor (partial sums), or gives another shape than the golden one, stays as it is:
    what is computed from it is not on right inputs.
    """
    seqs = [reported.seq for reported in plain.step(step).sequences]
    for place, tap in enumerate(plain.taps):
        for seq in seqs if wanted(tap.name) else ():
            patch = _correction(plain, golden, place, step, seq)
            if patch is not None:
                yield patch


def _correction(plain: Session, golden: Session, place: int, step: int, seq: int) -> Patch | None:
    tap = plain.taps[place]
    right = golden.rebuilt(tap.name, step=step, seq=seq, slice="").array if golden.has_tap(tap.name) else None
    held = plain.parts(tap.name, step=step, seq=seq, slice="")
    try:
        seen = plain.rebuilt(tap.name, step=step, seq=seq, slice="").array
    except LayoutError:
        return None
    if right is None or seen is None or seen.shape != right.shape:
        return None
    shapes = [held[rank].array.shape for rank in range(plain.ranks)]
    whole = tuple((0, length) for length in right.shape)
    return Patch(tap.index, seq, step, cut(tap.layout, shapes, whole, right.astype(np.float32)), after=True)
