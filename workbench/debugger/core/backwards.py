"""Backwards through the record: to a position, to the last hit, to where something first went wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

from lockstep.workbench.debugger.answers import Position, Stop
from lockstep.workbench.debugger.core.catching import begun
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.step_end import look
from lockstep.workbench.debugger.errors import NotCaptured
from lockstep.workbench.debugger.stops.breakpoints import recorded_hits


def land(debugger: Debugger) -> None:
    """Before going back: finish the step in flight, so that it is part of the record."""
    if debugger.live:
        debugger.engine.land()


def backward_to(debugger: Debugger, position: Position) -> Stop:
    """Stand at an earlier position."""
    land(debugger)
    debugger.position = position
    if position.step < 0:
        return debugger.stop("entry", "the beginning")
    return debugger.stop("step", "gone back")


def reverse_continue(debugger: Debugger) -> Stop:
    """Back to the last place at which a breakpoint or watchpoint hits, or where a sentinel *first* fired."""
    land(debugger)
    here = debugger.position
    conditional = any(one.when is not None for one in debugger.breakpoints.at_taps())
    if conditional and here.step >= 0 and debugger.timeline.stats(here.branch, here.step) is None:
        raise NotCaptured(
            "conditions are judged on statistics, which were not recorded: run with `--capture stats`"
        )
    found = [at for at in (_last_hit(debugger, here), *_first_sentinels(debugger, here)) if at is not None]
    if not found:
        return backward_to(debugger, Position(here.branch, -1))
    position, ids, ranks, words = max(found, key=lambda one: order(one[0]))
    debugger.position = position
    reason = debugger.breakpoints.get(ids[0]).reason
    return debugger.stop(reason, words, thread_id=ranks[0] if ranks else 0, hit_breakpoint_ids=list(ids))


def order(at: Position) -> tuple[int, int]:
    """Positions of one branch in execution order; a step's end comes after all of its places."""
    return at.step, 1 << 30 if at.place is None else at.place


Target = tuple[Position, tuple[int, ...], tuple[int, ...], str]


def _last_hit(debugger: Debugger, here: Position) -> Target | None:
    """The latest hit of a break or watch before `here`."""
    timeline = debugger.timeline
    candidates = [one for one in debugger.breakpoints.at_taps() if one.kind != "catch"]
    if not candidates:
        return None
    for step, limit in timeline.backwards(here):
        debugger.interrupts.check()
        names = partial(timeline.names, here.branch, step)
        hits = recorded_hits(candidates, names, len(timeline.places), timeline.ranks)
        before = [place for place in hits if place < limit]
        if before:
            hit = hits[max(before)]
            words = "; ".join(debugger.breakpoints.get(id).describe() for id in hit.ids)
            return Position(here.branch, step, hit.place), hit.ids, hit.ranks, words
    return None


def _first_sentinels(debugger: Debugger, here: Position) -> list[Target | None]:
    """Where each catchpoint first fired, if that is before `here`."""
    return [
        _first(debugger, here, one) for one in debugger.breakpoints if one.enabled and one.kind == "catch"
    ]


def _first(debugger: Debugger, here: Position, one: Any) -> Target | None:
    timeline = debugger.timeline
    for step in range(here.step + 1):
        debugger.interrupts.check()
        if one.places:
            names = partial(timeline.names, here.branch, step)
            begins = {one.id: begun(timeline, one.what, here.branch, step)}
            hits = recorded_hits([one], names, len(timeline.places), timeline.ranks, begins)
            place, ranks, words = (min(hits), hits[min(hits)].ranks, "") if hits else (None, (), "")
            fired = bool(hits)
        else:
            found = look(debugger, one.what, here.branch, step)
            fired = found is not None
            place, ranks, words = (found.tap, found.ranks, f": {found.words}") if found else (None, (), "")
        if fired:
            at = Position(here.branch, step, place)
            if order(at) >= order(here):
                return None
            return at, (one.id,), ranks, f"first {one.describe()}{words}"
    return None
