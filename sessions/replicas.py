"""Which ranks must hold the same bits of a tap, and which of them do not, by their checksums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.layouts import Layout, shard_groups
from lockstep.sessions.layouts import parse as parse_layout


def replica_groups(layout: Layout | str, ranks: int) -> list[range]:
    """The groups of two or more ranks that must hold the same bits under `layout`: all ranks of a replicated
    tensor, the ranks that share a shard (KV heads, when there are more ranks than heads). A layout that does not
    fit the number of ranks has none."""
    layout = parse_layout(layout) if isinstance(layout, str) else layout
    if layout.kind == "replicate":
        return [range(ranks)] if ranks > 1 else []
    if layout.kind == "partial" or layout.replicas == 1 or ranks % layout.replicas:
        return []
    return shard_groups(layout, ranks)


class Replicas:
    """The replica groups of every tap of a session, compared with the checksums of a step."""

    def __init__(self, layouts: Sequence[str], ranks: int) -> None:
        self.groups: tuple[list[range], ...] = tuple(replica_groups(layout, ranks) for layout in layouts)
        #: [taps, ranks]: the lowest rank of each rank's group; a rank without replicas leads itself.
        self._leaders = np.tile(np.arange(ranks), (len(layouts), 1))
        for tap, groups in enumerate(self.groups):
            for group in groups:
                self._leaders[tap, group] = group.start

    def disagreeing(self, checksums: NDArray[np.uint64]) -> dict[int, tuple[int, ...]]:
        """By tap index, in execution order, the ranks that differ from the majority of their replicas (from the
        lowest rank where there is none). `checksums[taps, ranks]` are those of one step."""
        differs = checksums != np.take_along_axis(checksums, self._leaders, axis=1)
        return {
            int(tap): tuple(rank for group in self.groups[tap] for rank in _odd(checksums[tap], group))
            for tap in np.flatnonzero(differs.any(axis=1))
        }

    def first_disagreeing(self, checksums: NDArray[np.uint64]) -> tuple[int, tuple[int, ...]] | None:
        """The first tap (its index) whose replicas differ, and the ranks that do; None where all agree."""
        return next(iter(self.disagreeing(checksums).items()), None)


def _odd(checksums: NDArray[np.uint64], group: range) -> list[int]:
    """The ranks of a group whose checksum is not its commonest: on a tie the one that the lowest rank has."""
    values = [int(checksums[rank]) for rank in group]
    usual = Counter(values).most_common(1)[0][0]  # the first of the commonest
    return [rank for rank, value in zip(group, values, strict=True) if value != usual]
