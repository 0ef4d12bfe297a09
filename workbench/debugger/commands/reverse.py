"""Commands that go back. They read the record; the engine follows only when something new must be run."""

from __future__ import annotations

from lockstep.workbench.debugger.answers import Position, Result
from lockstep.workbench.debugger.commands.run import COUNT, positive
from lockstep.workbench.debugger.core import backwards
from lockstep.workbench.debugger.core.backwards import backward_to
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import Key, command
from lockstep.workbench.debugger.errors import Interrupted


@command(
    "reverse-next", "rn", arguments=(COUNT,), group="reversing", changes=True,
    key=Key("N", "previous token", footer="back"),
    help="back to the end of the previous token step",
)  # fmt: skip
def reverse_next(debugger: Debugger, count: int) -> Result:
    """COUNT steps back."""
    at = debugger.position
    return backward_to(debugger, Position(at.branch, max(at.step - positive(count), -1)))


@command(
    "reverse-step", "rs", arguments=(COUNT,), group="reversing", changes=True, inside=True,
    key=Key("S", "back into the layer before"),
    help="back to the first operation of this or the previous layer",
)  # fmt: skip
def reverse_step(debugger: Debugger, count: int) -> Result:
    """COUNT layers back."""
    places = debugger.timeline.places
    for _ in range(positive(count)):
        at = debugger.position
        if at.step < 0:
            break
        before = places.preceding(at.place)
        place = None if before is None else places.layer_start(before)
        backward_to(debugger, Position(at.branch, at.step if place is not None else at.step - 1, place))
    return backward_to(debugger, debugger.position)


@command(
    "reverse-stepi", "rsi", "reverse-nexti", "rni", arguments=(COUNT,), group="reversing", changes=True, inside=True,
    key=Key("I", "one operation back"),
    help="back one operation",
)  # fmt: skip
def reverse_stepi(debugger: Debugger, count: int) -> Result:
    """COUNT operations back."""
    for _ in range(positive(count)):
        at = debugger.position
        if at.step < 0:
            break
        before = debugger.timeline.places.preceding(at.place)
        debugger.position = Position(at.branch, at.step if before is not None else at.step - 1, before)
    return backward_to(debugger, debugger.position)


@command(
    "reverse-continue", "rc", group="reversing", changes=True,
    key=Key("C", "back to the stop before"),
    help="back to the last breakpoint, or to where a catchpoint first fired",
    details="`catch nan` then `reverse-continue` goes to the first operation of the branch that held NaN; a"
    " breakpoint or watchpoint is gone back to as in gdb, the latest hit before here.",
)  # fmt: skip
def reverse_continue(debugger: Debugger) -> Result:
    """Back to the last stop."""
    try:
        return backwards.reverse_continue(debugger)
    except Interrupted:
        return debugger.stop("pause", "interrupted")
