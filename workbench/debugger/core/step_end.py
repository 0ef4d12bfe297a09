"""What stops a run at the end of a step."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lockstep.engine.faults.catalogue import faults_of
from lockstep.sessions import Session
from lockstep.workbench.debugger.answers import Position, Stop
from lockstep.workbench.debugger.core import sentinels
from lockstep.workbench.debugger.core.catching import desyncs, report
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.goal import Goal
from lockstep.workbench.debugger.stops.breakpoints import Breakpoint, Hit
from lockstep.workbench.settings import session_limits
from lockstep.workbench.views.sentinels import SentinelFinding, misaligned


def stop_after(debugger: Debugger, goal: Goal, inside: bool, passed: int | None) -> Stop | None:
    """The stop at the end of a step, if there is one: sentinels (of those at a place, what lies behind `passed`), a
    cache that has lost rows, the goal, the end of the text."""
    at = debugger.position
    if not goal.quiet:
        for one in debugger.breakpoints.sentinels().values() if goal.catching else ():
            found = _caught(debugger, one, at, -1 if passed is None else passed)
            if found is not None and debugger.breakpoints.count([one.id]):
                if found.tap is not None:
                    debugger.position = Position(at.branch, at.step, found.tap)
                return debugger.stop(
                    "exception", f"{one.describe()}: {found.words}",
                    thread_id=found.ranks[0] if found.ranks else 0, hit_breakpoint_ids=[one.id],
                )  # fmt: skip
        found = _newly_misaligned(debugger, at)
        if found is not None:
            return debugger.stop(
                "exception",
                f"cache misaligned: {found.words}",
                thread_id=found.ranks[0] if found.ranks else 0,
            )
    if goal.last == at.step or (inside and goal.stop in ("operation", "layer")):
        beyond = "" if not _ended_before(debugger, at) else ", beyond the end of the text"
        return debugger.stop(goal.reason, f"step {at.step} is done{beyond}")
    if not goal.quiet and sentinels.eos(debugger.timeline, at.branch, at.step, eos_ids(debugger)):
        return debugger.stop("end", "end of the text")
    return None


def _caught(debugger: Debugger, one: Breakpoint, at: Position, passed: int) -> SentinelFinding | None:
    """What a catchpoint finds in a step, behind place `passed` if it is at a place; ranks that disagree only if that
    is new."""
    if one.what != "desync":
        found = look(debugger, one.what, at.branch, at.step)
        return None if found is not None and found.tap is not None and found.tap <= passed else found
    found = next(
        (each for each in desyncs(debugger.timeline, one, at.branch, at.step) if (each.tap or 0) > passed),
        None,
    )
    if found is not None and found.tap is not None:
        report(debugger, Hit(found.tap, (one.id,), found.ranks), at.step)
    return found


def _ended_before(debugger: Debugger, at: Position) -> bool:
    """Whether the step before ended the text: this one is the first of those that nobody would generate."""
    timeline = debugger.timeline
    return at.step > 0 and sentinels.eos(timeline, at.branch, at.step - 1, eos_ids(debugger)) is not None


def _newly_misaligned(debugger: Debugger, at: Position) -> SentinelFinding | None:
    """The cache does not hold what the positions ask for, and did after the step before. Where a known fault is in
    force that is its doing, and nothing stops."""
    timeline = debugger.timeline
    if timeline.session is None or faults_of(timeline.owner(at.branch, at.step).rules):
        return None
    before = timeline.record(at.branch, at.step - 1).sequences if at.step else ()
    if misaligned(timeline.session, before) is not None:
        return None
    return misaligned(timeline.session, timeline.record(at.branch, at.step).sequences)


def look(debugger: Debugger, sentinel: str, branch: int, step: int) -> SentinelFinding | None:
    """Whether a sentinel that looks at whole steps fires at one."""
    timeline = debugger.timeline
    if sentinel == "desync":
        return timeline.desync(branch, step)
    if sentinel == "repetition":
        return sentinels.repetition(timeline, branch, step, debugger.texts.label)
    if sentinel == "eos":
        return sentinels.eos(timeline, branch, step, eos_ids(debugger))
    if sentinel == "golden":
        with ExitStack() as stack:
            path = debugger.settings.golden
            reference = (
                None if path is None else stack.enter_context(Session.open(Path(path), session_limits()))
            )
            return sentinels.golden(timeline, branch, step, reference)
    return None


def eos_ids(debugger: Debugger) -> list[int]:
    """The ids that end a text."""
    return list(debugger.session.meta.model.eos_ids) if debugger.timeline.session is not None else []
