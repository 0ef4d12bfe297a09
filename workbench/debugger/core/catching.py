"""Catchpoints that are reported where something begins, and only once: NaN, Inf, ranks that disagree.

In the step after, the same operation may begin it again (a wrong mask does so in every pass), and all that is computed
from it has it too. Neither is new: what was reported is carried on for as long as every step has it again. What a
motion that nothing stops has passed (`goto`, a toggle's run ahead) was not reported: it is at the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from lockstep.sessions.records import STATISTICS
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.executor import Flight
from lockstep.workbench.debugger.core.timeline import Timeline
from lockstep.workbench.debugger.stops.beginnings import Beginning, Wrong, carries
from lockstep.workbench.debugger.stops.breakpoints import Breakpoint, Hit, recorded_hits
from lockstep.workbench.views.sentinels import SentinelFinding, replicas_differ

#: Steps that are looked back over for where something was reported.
_LOOKS_BACK = 256


def begun(timeline: Timeline, sentinel: str, branch: int, step: int) -> Wrong | None:
    """Where it begins in a recorded step; None where that was not measured."""
    now = _wrong(timeline, sentinel, branch, step)
    if now is None or not now.any():
        return now
    blind: frozenset[int] = frozenset()
    if sentinel == "desync" and timeline.session is not None:
        groups = timeline.session.replicas.groups
        blind = frozenset(place for place, of in enumerate(groups) if not of)
    before = _wrong(timeline, sentinel, branch, step - 1) if step else None
    return timeline.places.flow.begun(now, before, blind)


def hits(debugger: Debugger, candidates: Iterable[Breakpoint], branch: int, step: int) -> Mapping[int, Hit]:
    """Every place of a recorded step at which one of them hits; of a catchpoint, what is new to it."""
    timeline, chosen = debugger.timeline, list(candidates)
    names = partial(timeline.names, branch, step)
    news = {one.id: _new(timeline, one, branch, step) for one in chosen if one.kind == "catch"}
    return recorded_hits(chosen, names, len(timeline.places), timeline.ranks, news)


def hits_in_flight(debugger: Debugger, flight: Flight) -> list[int]:
    """The breakpoints that hit where a pass stands still, without catchpoints that find nothing new there."""
    timeline, stopped = debugger.timeline, flight.stopped
    found = []
    for id in stopped.breaks:
        one = debugger.breakpoints.get(id)
        if one.kind == "catch":
            cells = [Beginning(flight.branch, flight.step, stopped.place, rank) for rank in stopped.ranks]
            if not _begins_in_flight(timeline, one, flight):
                continue
            if not [cell for cell in cells if not _carried(timeline, one, flight.branch, cell)]:
                continue
            one.reported.update(cells)
        found.append(id)
    return found


def desyncs(timeline: Timeline, one: Breakpoint, branch: int, step: int) -> Iterator[SentinelFinding]:
    """Where ranks begin to disagree in a recorded step and that is new to the catchpoint, in execution order."""
    table = _new(timeline, one, branch, step)
    if table is not None and timeline.session is not None:
        for place in np.flatnonzero(table.any(axis=1)):
            ranks = tuple(int(rank) for rank in np.flatnonzero(table[place]))
            yield replicas_differ(timeline.session, int(place), ranks)


def report(debugger: Debugger, hit: Hit, step: int) -> None:
    """The catchpoints that hit there have come by it."""
    branch = debugger.timeline.owner(debugger.position.branch, step).id
    for id in hit.ids:
        one = debugger.breakpoints.get(id)
        if one.kind == "catch":
            one.reported.update(Beginning(branch, step, hit.place, rank) for rank in hit.ranks)


def _wrong(timeline: Timeline, sentinel: str, branch: int, step: int) -> Wrong | None:
    record = timeline.record(branch, step)
    if sentinel in ("nan", "inf"):
        return None if record.stats is None else record.stats[:, :, STATISTICS.index(sentinel)] > 0
    if record.checksums is None or timeline.session is None:
        return None
    table = np.zeros(record.checksums.shape, dtype=bool)
    for place, ranks in timeline.session.replicas.disagreeing(record.checksums).items():
        table[place, list(ranks)] = True
    return table


def _new(timeline: Timeline, one: Breakpoint, branch: int, step: int) -> Wrong | None:
    table = begun(timeline, one.what, branch, step)
    if table is None or not table.any():
        return table
    owner = timeline.owner(branch, step).id
    for place, rank in zip(*np.nonzero(table), strict=True):
        cell = Beginning(owner, step, int(place), int(rank))
        table[place, rank] = not _carried(timeline, one, branch, cell)
    return table


def _carried(timeline: Timeline, one: Breakpoint, branch: int, cell: Beginning) -> bool:
    return carries(one.reported, cell, _before(timeline, one.what, branch, cell))


def _before(timeline: Timeline, sentinel: str, branch: int, cell: Beginning) -> Iterator[Beginning]:
    """The same beginning in the steps before, newest first, as far as they have it without a gap."""
    for step in range(cell.step - 1, max(cell.step - _LOOKS_BACK, 0) - 1, -1):
        yield Beginning(timeline.owner(branch, step).id, step, cell.place, cell.rank)
        table = begun(timeline, sentinel, branch, step)
        if table is None or not table[cell.place, cell.rank]:
            return


def _begins_in_flight(timeline: Timeline, one: Breakpoint, flight: Flight) -> bool:
    """Whether that is so as far as the statistics of the taps that have passed show."""
    if flight.stopped.stats is None:
        return True
    now = flight.stopped.stats[:, :, STATISTICS.index(one.what)] > 0
    before = _wrong(timeline, one.what, flight.branch, flight.step - 1) if flight.step else None
    return bool(timeline.places.flow.begun(now, before)[flight.stopped.place].any())
