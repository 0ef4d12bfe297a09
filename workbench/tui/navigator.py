"""Looking elsewhere in what was recorded: nothing runs, and the debugger stays where it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions.meta import is_companion
from lockstep.workbench.debugger.host.messages import DebuggerState
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.views.overview import Overview
from lockstep.workbench.views.sentinels import stops
from lockstep.workbench.views.where import Where


class Navigator:
    """The places near a place, as far as the session has them."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    async def nearest(self, where: Where) -> Where:
        """The place, at the nearest step that its branch has."""
        steps = await self.reader.ask(lambda source: source.reach(where.branch))
        return clamped(where, steps)

    async def last(self) -> Where | None:
        """The last step of the first branch; None while nothing was run."""
        steps = await self.reader.ask(lambda source: source.reach(0))
        batch = await self.reader.ask(lambda source: source.batch(0))
        return Where(step=steps.stop - 1, seq=batch.first) if len(steps) else None

    async def of_debugger(self, at: DebuggerState, where: Where, overview: Overview) -> Where:
        """The place where the debugger stands; the operation that is looked at stays between two steps."""
        tap = overview.tap(at.tap)
        there = replace(where, branch=at.branch, step=max(at.step, 0), tap=where.tap if tap is None else tap)
        return await self.nearest(there)

    async def stop_beside(self, where: Where, by: int) -> Where | None:
        """The place at the next recorded stop (`by` 1) or the one before (-1); None where there is none."""
        found = await self.reader.ask(lambda source: stops(source.session, where.branch))
        step = next_stop((event.step for event in found), where.step, by)
        return None if step is None else replace(where, step=step)


def clamped(where: Where, steps: range) -> Where:
    """The place at the nearest of `steps`; unchanged where there are none."""
    return replace(where, step=min(max(where.step, steps.start), steps.stop - 1)) if len(steps) else where


def updated(there: Where, before: Where, now: Where, names: Iterable[str]) -> Where:
    """The place `there`, found from `before`, with what of `names` was chosen anew since: what is looked at `now`."""
    chosen = {name: getattr(now, name) for name in names if getattr(now, name) != getattr(before, name)}
    return replace(there, **chosen)


def next_stop(steps: Iterable[int], step: int, by: int) -> int | None:
    """The nearest of `steps` (in any order) after `step` (`by` 1) or before it (-1)."""
    if by > 0:
        return min((one for one in steps if one > step), default=None)
    return max((one for one in steps if one < step), default=None)


def same_operation(taps: Sequence[str], where: Where, by: int) -> Where:
    """The same operation of a neighbouring layer; where there is none, or no tap at all, the place."""
    if where.tap >= len(taps):
        return where
    present = layer_of(taps[where.tap])
    layer, short = (present or 0) + by, "" if present is None else local_name(taps[where.tap])
    name = f"layers.{layer}.{short}"
    found = [i for i, known in enumerate(taps) if known == name or (not short and layer_of(known) == layer)]
    return replace(where, tap=found[0]) if found else where


def operation_beside(taps: Sequence[str], where: Where, by: int) -> Where:
    """The next operation (`by` 1) or the one before (-1); at the end of the step, the place."""
    ahead = range(where.tap + by, len(taps) if by > 0 else -1, by)
    tap = next((tap for tap in ahead if not is_companion(taps[tap])), None)
    return where if tap is None else replace(where, tap=tap)


def layer_beside(taps: Sequence[str], where: Where, by: int) -> Where:
    """The first operation of the next layer (`by` 1) or of the one before (-1), what is outside all layers counting as
    one; at the end of the step, the place."""
    layers = [layer_of(tap) for tap in taps]
    begins = [i for i, layer in enumerate(layers) if i == 0 or layers[i - 1] != layer]
    present = max((i for i, start in enumerate(begins) if start <= where.tap), default=0) + by
    return replace(where, tap=begins[present]) if 0 <= present < len(begins) else where


def next_rank(where: Where, ranks: int) -> Where:
    """All ranks, then each by itself, then all again."""
    if where.rank is None:
        return replace(where, rank=0)
    return replace(where, rank=where.rank + 1 if where.rank + 1 < ranks else None)
