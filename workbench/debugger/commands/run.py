"""Commands that go forward."""

from __future__ import annotations

from dataclasses import replace

from lockstep.workbench.debugger.answers import Message, Position, Result, Stop
from lockstep.workbench.debugger.core.backwards import backward_to
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.goal import Goal
from lockstep.workbench.debugger.core.motion import forward
from lockstep.workbench.debugger.core.registry import Argument, Key, command
from lockstep.workbench.debugger.errors import CommandError, DebuggerError, RunEnded

COUNT = Argument("count", "int", default=1, help="how many times")


@command(
    "run", "r", group="running", changes=True,
    help="run from the beginning of the branch",
    details="Goes to the beginning and continues from there, through what is recorded already.",
)  # fmt: skip
def run(debugger: Debugger) -> Result:
    """From the beginning to the first stop."""
    backward_to(debugger, Position(debugger.position.branch, -1))
    return forward(debugger, Goal())


@command(
    "continue", "c", "fg", group="running", changes=True,
    key=Key("c", "continue to the next stop", footer="continue"),
    help="run until something stops it",
    details="Stops at breakpoints, watchpoints and catchpoints, at the end of the text, or when interrupted.",
)  # fmt: skip
def continue_(debugger: Debugger) -> Result:
    """To the next stop."""
    return forward(debugger, Goal())


@command(
    "next", "n", arguments=(COUNT,), group="running", changes=True,
    key=Key("n", "next token", footer="next"),
    help="run to the end of the next token step",
)  # fmt: skip
def next_step(debugger: Debugger, count: int) -> Result:
    """COUNT steps on; inside a step, its end is the first."""
    inside = debugger.position.place is not None
    last = debugger.position.step + positive(count) - inside
    return forward(debugger, Goal(last=last))


@command(
    "step", "s", arguments=(COUNT,), group="running", changes=True, inside=True,
    key=Key("s", "into the next layer", footer="layer"),
    help="run to the first operation of the next layer",
)  # fmt: skip
def step(debugger: Debugger, count: int) -> Result:
    """COUNT layers on."""
    return _repeat(debugger, Goal("layer"), count)


@command(
    "stepi", "si", arguments=(COUNT,), group="running", changes=True, inside=True,
    key=Key("i", "one operation", footer="op"),
    help="run one operation: all ranks stop at the same tap",
)  # fmt: skip
def stepi(debugger: Debugger, count: int) -> Result:
    """COUNT operations on."""
    return _repeat(debugger, Goal("operation"), count)


@command(
    "nexti", "ni", arguments=(COUNT,), group="running", changes=True, inside=True,
    help="run one operation, collectives included",
    details="The same as `stepi`: an operation's collectives belong to it.",
)  # fmt: skip
def nexti(debugger: Debugger, count: int) -> Result:
    """COUNT operations on."""
    return _repeat(debugger, Goal("operation"), count)


@command(
    "finish", "fin", group="running", changes=True, inside=True,
    key=Key("f", "finish the layer"),
    help="run to the last operation of this layer",
    details="Standing at the last operation already, it finishes the step.",
)  # fmt: skip
def finish(debugger: Debugger) -> Result:
    """To the end of the layer."""
    at = debugger.position
    if at.place is None:
        raise DebuggerError("not inside a step: `step` enters the next one")
    end = debugger.timeline.places.layer_end(at.place)
    if end == at.place:
        return forward(debugger, Goal(last=at.step))
    return forward(debugger, Goal("place", end))


@command(
    "until", "u", arguments=(Argument("location", "location", required=True),), group="running", changes=True,
    help="run until a tap is passed, or to the end of a step",
    details="`until layers.3.attn.probs`, `until 12`.",
)  # fmt: skip
def until(debugger: Debugger, location: str) -> Result:
    """To a place or the end of a step."""
    if location.isdigit():
        if int(location) < debugger.position.step + (debugger.position.place is None):
            raise DebuggerError(f"step {location} is behind: `goto {location}` goes back to it")
        return forward(debugger, Goal(last=int(location)))
    return forward(debugger, Goal("place", debugger.timeline.places.matching(location)[0]))


@command(
    "goto", arguments=(
        Argument("step", "int", required=True, help="-1: before anything was run"),
        Argument("tap", "location", help="inside the step"),
    ),
    group="running", changes=True,
    help="go to a step, forwards or backwards, without stopping on the way",
)  # fmt: skip
def goto(debugger: Debugger, step: int, tap: str | None) -> Result:
    """To the end of a step, or to a tap inside it."""
    at, last = debugger.position, debugger.timeline.last(debugger.position.branch)
    place = None if tap is None else debugger.timeline.places.matching(tap)[0]
    if step < -1 or (step == -1 and tap is not None):
        raise CommandError("goto wants a step from 0 on, or -1 for the beginning")
    if step <= last or step == -1:
        stop = backward_to(debugger, Position(at.branch, step, place))
        where = f"step {step} is done" if place is None else f"at {debugger.timeline.places.names[place]}"
        return replace(stop, reason="goto", description=where) if step >= 0 else stop
    if not debugger.live:
        raise DebuggerError(f"the recording ends with step {last}")
    if debugger.engine.flight is None or debugger.position.step != step:
        backward_to(debugger, Position(at.branch, last))
        if step - 1 > last:
            before = forward(debugger, Goal(last=step - 1, quiet=True, reason="goto"))
            if before.reason != "goto":
                return before
    flight = debugger.engine.flight
    if place is not None and flight is not None and flight.stopped.place >= place:
        backward_to(debugger, Position(at.branch, step, place))
        return debugger.stop("goto", f"at {debugger.timeline.places.names[place]}")
    goal = Goal(last=step) if place is None else Goal("place", place)
    return forward(debugger, replace(goal, quiet=True, reason="goto"))


@command(
    "interrupt", group="running", key=Key("ctrl+c", "interrupt what runs"),
    help="stop what is running, within a second",
)  # fmt: skip
def interrupt(debugger: Debugger) -> Result:
    """While something runs the host handles this at once; here nothing does."""
    return Message("nothing is running")


@command("quit", "q", "exit", group="session", help="end the run; the session is kept")
def quit_(debugger: Debugger) -> Result:
    """Leave."""
    raise RunEnded("quit")


def _repeat(debugger: Debugger, goal: Goal, count: int) -> Stop:
    stop = forward(debugger, goal)
    for _ in range(positive(count) - 1):
        if stop.reason != goal.reason:
            break
        stop = forward(debugger, goal)
    return stop


def positive(count: int) -> int:
    """`count` of a command. CommandError where it is none."""
    if count < 1:
        raise CommandError(f"the count must be at least 1, not {count}")
    return count
