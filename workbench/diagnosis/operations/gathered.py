"""Logits that were gathered: each rank gives its part of the vocabulary, from what it holds itself.

Where ranks that should hold the same hidden state do not, as after a missing all-reduce, the head is right all the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.workbench.diagnosis.recording import Array

#: Share of its error that a rank's own logits keep where those of all ranks, in their parts, are what was seen.
_KEPT = 0.05


def gathered_logits(own: Array, by_rank: Sequence[Array], seen: Array) -> Array:
    """The logits [N, vocab] that `seen` should hold: `own`, those of the rank that has them, or, where that is what
    was seen, of each rank (`by_rank`, in their order) a part of the vocabulary. Where one begins is not known: engines
    pad it in their own ways."""
    if not by_rank or seen.shape != own.shape or not all(np.isfinite(x).all() for x in (seen, own, *by_rank)):
        return own
    ends = _ends(np.stack([((x - seen) ** 2).sum(0) for x in by_rank]))
    parts = [x[:, start:end] for x, start, end in zip(by_rank, (0, *ends), ends, strict=False)]
    together = np.concatenate(parts, axis=1)
    return together if np.linalg.norm(together - seen) <= _KEPT * np.linalg.norm(own - seen) else own


def _ends(errors: Array) -> tuple[int, ...]:
    """Where each rank's part ends, so that the sum of `errors` [ranks, columns] is least."""
    sums = np.concatenate([np.zeros((len(errors), 1)), errors.cumsum(1)], axis=1)  # up to a column
    best, begins = sums[0], []
    for of in sums[1:]:
        ahead = best - of
        least = np.minimum.accumulate(ahead)
        begins.append(np.maximum.accumulate(np.where(ahead == least, np.arange(len(ahead)), 0)))
        best = least + of
    ends = [len(best) - 1]
    for starts in reversed(begins):
        ends.insert(0, int(starts[ends[0]]))
    return tuple(ends)
