"""How many rows each layer of each rank held of a sequence, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.errors import SessionError
from lockstep.workbench.views.cached_lengths import expected_rows
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: The most steps that are looked at.
_STEPS = 256


@dataclass(frozen=True, slots=True, eq=False)
class CacheHistory:
    """`rows[layers × ranks, steps]` cached after each step from `first` on, -inf where that is not known; `expected`
    [steps] is what the positions ask for; `wrong` are the cells that hold another number."""

    rows: NDArray[np.float32]
    expected: tuple[int | None, ...]
    first: int
    ranks: int
    wrong: frozenset[tuple[int, int]]
    begin: int = 0  # the first step of the branch: `first` is later in a long run

    @property
    def even(self) -> bool:
        """Whether every layer of every rank held after each step what the positions ask for, from the first step on
        that the sequence took part in."""
        there = np.isfinite(self.rows)
        return not self.wrong and bool(there[:, there.any(0).argmax() :].all())


def cache_history(source: SessionSource, where: Where, layers: int) -> CacheHistory | None:
    """Of the sequence of `where`, up to its step; None where no step reports it."""
    ranks, last = source.session.ranks, source.passed(where).step
    steps = range(max(source.session.steps(where.branch).start, last - _STEPS + 1), last + 1)
    if not steps or not layers:
        return None
    rows = np.full((layers * ranks, len(steps)), -np.inf, np.float32)
    expected: list[int | None] = []
    wrong: set[tuple[int, int]] = set()
    for column, step in enumerate(steps):
        try:
            reported = source.sequence(step, where.branch, where.seq)
        except SessionError:
            reported = None  # the pane of that step states what is damaged
        wanted = expected_rows(reported) if reported is not None else None
        expected.append(wanted)
        for rank, lengths in enumerate(reported.kv_lens if reported is not None else ()):
            for layer, held in enumerate(lengths[:layers]):
                rows[layer * ranks + rank, column] = held
                if held != wanted:
                    wrong.add((layer * ranks + rank, column))
    if not np.isfinite(rows).any():
        return None
    begin = source.session.steps(where.branch).start
    return CacheHistory(rows, tuple(expected), steps.start, ranks, frozenset(wrong), begin)
