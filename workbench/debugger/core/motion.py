"""Motion: forwards through what was recorded and on into what was not.

Both stop at the same things. A recorded step is judged from its statistics, a new one beside the taps while
it runs; the two agree, so a replay stops where the run did.
"""

from __future__ import annotations

from typing import Any

from lockstep.engine.taps.breaks import PauseSpec
from lockstep.sessions.records import StepRecord
from lockstep.workbench.debugger.answers import Position, Stop
from lockstep.workbench.debugger.core import catching
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.executor import Flight
from lockstep.workbench.debugger.core.goal import Goal
from lockstep.workbench.debugger.core.step_end import stop_after
from lockstep.workbench.debugger.errors import DebuggerError, Interrupted, ReplayMismatch
from lockstep.workbench.debugger.events import StepEvent

#: Seconds within which an interrupt may act after a pass instead of inside it: where that costs nothing, and where
#: it spares a collective a tap.
_QUICK, _SOON = 0.25, 0.8


def forward(debugger: Debugger, goal: Goal) -> Stop:
    """Run until the goal, or until something stops it."""
    try:
        while True:
            debugger.interrupts.check()
            stop = _pass(debugger, goal)
            if stop is not None:
                return stop
    except Interrupted:
        return debugger.stop("pause", "interrupted")
    except ReplayMismatch as error:
        debugger.engine.forget_cache()
        debugger.position = Position(error.branch, error.step, error.place)
        return debugger.stop("divergence", str(error), thread_id=error.ranks[0])


def _pass(debugger: Debugger, goal: Goal) -> Stop | None:
    """Go to the end of the present step, or through the next; None at its end."""
    at = debugger.position
    inside = at.place is not None
    step = at.step if inside else at.step + 1
    recorded = step <= debugger.timeline.last(at.branch) and debugger.flight is None
    if recorded:
        stop = _recorded(debugger, goal, step)
    elif debugger.executor is None:
        return debugger.stop("end", "end of the recording")
    else:
        judged_after = not inside and _judged_after(debugger, goal)
        stop = _new(debugger, goal, step, through=judged_after)
        if stop is None and judged_after:
            stop = _recorded(debugger, goal, step)
    if stop is not None:
        return stop
    debugger.position = Position(at.branch, step)
    debugger.events(StepEvent(at.branch, step))
    # What a sentinel finds in a recorded step lies behind whoever has passed that place already.
    passed = at.place if inside and recorded else None
    return stop_after(debugger, goal, inside, passed)


def _recorded(debugger: Debugger, goal: Goal, step: int) -> Stop | None:
    """Through a recorded step."""
    at, timeline = debugger.position, debugger.timeline
    after = -1 if at.place is None else at.place
    target = goal.place_in(debugger.timeline.places, after)
    candidates = goal.stoppers(debugger.breakpoints)
    hits = catching.hits(debugger, candidates, at.branch, step) if candidates else {}
    for place in sorted(hits):
        if place > after and (target is None or place <= target):
            catching.report(debugger, hits[place], step)
            stopping = debugger.breakpoints.count(hits[place].ids)
            if stopping:
                debugger.position = Position(at.branch, step, place)
                return hit_stop(debugger, stopping, hits[place].ranks)
    if target is not None:
        debugger.position = Position(at.branch, step, target)
        return debugger.stop(goal.reason, f"at {timeline.places.names[target]}")
    return None


def _judged_after(debugger: Debugger, goal: Goal) -> bool:
    """Whether conditions can be judged on a new step's statistics when it is over: asking the ranks at every tap
    takes a collective each, many times what the step itself takes. Not where something stops the step inside,
    nor where it is long enough for a user to want to see where it stands."""
    breaks = goal.stoppers(debugger.breakpoints)
    conditional = bool(breaks) and all(one.when is not None for one in breaks)
    statistics = debugger.engine.inferior.capture.statistics
    soon = debugger.engine.over_within(debugger.position.branch, _SOON)
    return goal.stop == "never" and conditional and statistics and soon


def _new(debugger: Debugger, goal: Goal, step: int, *, through: bool) -> Stop | None:
    """Through a step that is run now; with `through`, to its end whatever happens in it."""
    engine, branch = debugger.engine, debugger.position.branch
    while True:
        flight = engine.flight
        if flight is None:
            end = _exhausted(debugger)
            if end is not None:
                return end
            after = -1
            outcome = engine.start(branch, None if through else _pause(debugger, goal, False))
        else:
            after = flight.stopped.place
            outcome = engine.go_on(_pause(debugger, goal, True) or PauseSpec())
        if isinstance(outcome, StepRecord):
            return None
        stop = _in_flight(debugger, goal, outcome, after)
        if stop is not None:
            return stop


def _pause(debugger: Debugger, goal: Goal, inside: bool) -> PauseSpec | None:
    """What the ranks are to stop at. Stepping keeps what passes readable; running does not, because a
    long prefill would cost memory (what is looked at later is computed again). None where nothing can stop
    a pass that is over before anybody's patience is: then it costs nothing to be able to."""
    breaks = [one.message() for one in goal.stoppers(debugger.breakpoints)]
    soon = debugger.engine.over_within(debugger.position.branch, _QUICK)
    if not breaks and goal.stop == "never" and not inside and soon:
        return None
    keep = inside or goal.stop in ("operation", "layer", "place")
    return PauseSpec(goal.stop, goal.place, breaks, keep)


def _in_flight(debugger: Debugger, goal: Goal, flight: Flight, after: int) -> Stop | None:
    """What a stop inside a new step means; None: go on."""
    stopped = flight.stopped
    debugger.position = Position(flight.branch, flight.step, stopped.place)
    if stopped.reason == "interrupt":
        return debugger.stop("pause", "interrupted")
    if stopped.reason == "breakpoint":
        stopping = debugger.breakpoints.count(catching.hits_in_flight(debugger, flight))
        if stopping:
            return hit_stop(debugger, stopping, stopped.ranks)
        if goal.place_in(debugger.timeline.places, after) != stopped.place:
            return None
    return debugger.stop(goal.reason, f"at {debugger.timeline.places.names[stopped.place]}")


def hit_stop(debugger: Debugger, stopping: list[Any], ranks: tuple[int, ...]) -> Stop:
    """A stop at breakpoints."""
    words = "; ".join(one.describe() for one in stopping)
    return debugger.stop(
        stopping[0].reason, words, thread_id=ranks[0] if ranks else 0,
        hit_breakpoint_ids=[one.id for one in stopping],
    )  # fmt: skip


def _exhausted(debugger: Debugger) -> Stop | None:
    """The context is full: no pass can follow."""
    inferior = debugger.engine.inferior
    context = inferior.loaded[0].context
    line = debugger.timeline.line(debugger.position.branch)
    for seq in inferior.sequences:
        reported = debugger.timeline.sequence(line.id, line.steps - 1, seq) if line.steps else None
        if reported is not None and reported.positions[-1] + 1 >= context:
            return debugger.stop("end", f"the context is full ({context} tokens)")
    return None


def require_step(debugger: Debugger) -> Position:
    """Where the debugger stands, if anything was run at all."""
    if debugger.position.step < 0:
        last = debugger.timeline.last(debugger.position.branch)
        if debugger.live or last < 0:
            raise DebuggerError("nothing was run yet: `next` runs the first step")
        raise DebuggerError(
            f"a replay begins before step 0: `next` goes to it, `goto {last}` to the last one"
        )
    return debugger.position
