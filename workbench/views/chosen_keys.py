"""Which keys an indexer of sparse attention left out of what queries see."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import LAYER, instead_of
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

_CHOICES = instead_of(LAYER["attn.scores"].inputs["chosen"])


def left_out(
    source: SessionSource, where: Where, layer: int, first_query: int, shape: tuple[int, int]
) -> NDArray[np.bool_] | None:
    """Of queries, the first at position `first_query`, the keys [queries, keys] that they see and do not attend to. Of
    one whose choice was not recorded none is known to be. None where no choice was, or the layer makes none."""
    named = (f"layers.{layer}.attn.{one.rpartition('.')[2]}" for one in _CHOICES)
    tap = next((one for one in named if source.session.has_tap(one)), None)
    if tap is None:
        return None
    found, end, known = np.zeros(shape, bool), shape[0], False
    keys = np.arange(shape[1])
    for step, rebuilt in source.back_from(tap, where, source.session.steps(where.branch).start):
        sequence = source.sequence(step, where.branch, where.seq)
        new = len(sequence.ids) if sequence is not None else 0
        chosen = rebuilt.array if rebuilt.array is not None and rebuilt.array.ndim == 2 else ()
        for query, ids in zip(range(end - 1, -1, -1), reversed(chosen), strict=False):
            known = True
            found[query] = (keys <= first_query + query) & ~np.isin(keys, ids)
        end -= new
        if end <= 0:
            break
    return found if known else None


def newest_left_out(source: SessionSource, where: Where, layer: int, keys: int) -> NDArray[np.bool_] | None:
    """Those of the newest query among so many keys, [keys]."""
    found = left_out(source, where, layer, keys - 1, (1, keys))
    return None if found is None else found[0]
