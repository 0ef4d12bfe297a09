"""Where to look next: pure functions from a place to the next layer, operation, stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.taps.names import layer_of, local_name
from workbench.views.where import Where


def next_operation(taps: Sequence[str], where: Where, by: int, steps: range) -> Where:
    """The next tap; past the last one, the first of the next step."""
    tap = where.tap + by
    if 0 <= tap < len(taps):
        return replace(where, tap=tap)
    step = where.step + by
    if step not in steps:
        return replace(where, tap=min(max(tap, 0), len(taps) - 1))
    return replace(where, step=step, tap=0 if by > 0 else len(taps) - 1)


def next_layer(taps: Sequence[str], where: Where, by: int, steps: range) -> Where:
    """The first tap of the next layer; past the last layer what follows it, then the next step."""
    starts = [i for i, name in enumerate(taps) if i == 0 or layer_of(taps[i - 1]) != layer_of(name)]
    if by > 0:
        after = [i for i in starts if i > where.tap]
        return (
            replace(where, tap=after[0])
            if after
            else next_operation(taps, replace(where, tap=len(taps) - 1), 1, steps)
        )
    first = max(i for i in starts if i <= where.tap)
    before = [i for i in starts if i < first]
    return (
        replace(where, tap=before[-1]) if before else next_operation(taps, replace(where, tap=0), -1, steps)
    )


def end_of_layer(taps: Sequence[str], where: Where) -> Where:
    """The last tap of the present layer."""
    layer = layer_of(taps[where.tap])
    last = max(i for i, name in enumerate(taps) if layer_of(name) == layer)
    return replace(where, tap=where.tap if layer is None else last)


def same_operation(taps: Sequence[str], where: Where, by: int) -> Where:
    """The same operation of a neighbouring layer."""
    present = layer_of(taps[where.tap])
    layer, short = (present or 0) + by, "" if present is None else local_name(taps[where.tap])
    name = f"layers.{layer}.{short}"
    found = [i for i, known in enumerate(taps) if known == name or (not short and layer_of(known) == layer)]
    return replace(where, tap=found[0]) if found else where


def next_rank(where: Where, ranks: int) -> Where:
    """All ranks, then each by itself, then all again."""
    if where.rank is None:
        return replace(where, rank=0)
    return replace(where, rank=where.rank + 1 if where.rank + 1 < ranks else None)


def next_stop(stops: Sequence[tuple[int, int]], where: Where, by: int) -> int | None:
    """The step of the next stop of the branch: `stops` are (branch, step) in any order."""
    steps = sorted({step for branch, step in stops if branch == where.branch})
    ahead = [step for step in steps if (step > where.step if by > 0 else step < where.step)]
    return (ahead[0] if by > 0 else ahead[-1]) if ahead else None
