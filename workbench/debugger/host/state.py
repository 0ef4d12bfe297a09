"""What a status line shows of a debugger, live or in a replay."""

from __future__ import annotations

from lockstep.workbench.debugger.answers import Result
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.host.messages import (
    BranchState,
    BreakpointState,
    CommandAnswer,
    DebuggerState,
)


def state_of(debugger: Debugger) -> DebuggerState:
    """Where the debugger stands."""
    at, timeline = debugger.position, debugger.timeline
    return DebuggerState(
        branch=at.branch,
        step=at.step,
        sequence=debugger.sequence,
        tap=timeline.places.name(at.place) or None,
        last=timeline.last(at.branch),
        live=debugger.live,
        lost=debugger.lost or None,
        rules=timeline.line(at.branch).rules,
        branches=[
            BranchState(
                line.id, line.name, line.parent, line.fork_step, line.forked_at, line.rules, line.steps
            )
            for line in timeline.lines.values()
        ],
        session=str(debugger.session.path),
        breakpoints=[
            BreakpointState(one.id, one.kind, sorted(one.places))
            for one in debugger.breakpoints
            if one.enabled and one.kind != "catch"  # those look at every tap
        ],
    )


def command_answer(debugger: Debugger, result: Result) -> CommandAnswer:
    """What a command answered, and where it led."""
    return CommandAnswer(result.to_json(), result.to_text(), state_of(debugger))
