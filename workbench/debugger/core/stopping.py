"""What follows a stop: the commands of the breakpoints that hit are run, displays are shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from lockstep.engine.errors import RankError
from lockstep.workbench.debugger.answers import Failure, Message, Result, Stop
from lockstep.workbench.debugger.errors import DebuggerError, RunEnded
from lockstep.workbench.debugger.failures import exit_code
from lockstep.workbench.debugger.stops.breakpoints import Breakpoint, Breakpoints

#: Commands that breakpoint commands may run in a chain before it is taken for a loop.
_LONGEST_CHAIN = 1000

Execute = Callable[[str], Result]


def follow(stop: Stop, breakpoints: Breakpoints, displays: Sequence[str], execute: Execute) -> Stop:
    """Carry out what a stop brings with it. Returns the last stop of the chain, with all that was reported."""
    output: list[Result] = []
    stop = _run_commands(stop, breakpoints, execute, output)
    for shown in displays:
        try:
            output.append(execute(shown))
        except DebuggerError as error:
            output.append(Message(f"{shown}: {error}"))
    return replace(stop, output=(*stop.output, *output)) if output else stop


def catch_error(breakpoints: Breakpoints) -> Breakpoint | None:
    """The catchpoint that makes a stop of a lost rank, its hit counted; None where nothing is to stop there."""
    catch = breakpoints.sentinels().get("error")
    return catch if catch is not None and breakpoints.count([catch.id]) else None


def lost_rank(error: RankError) -> int:
    """The first rank that the error names."""
    found = re.search(r"rank (\d+)", str(error))
    return int(found[1]) if found else 0


def _run_commands(stop: Stop, breakpoints: Breakpoints, execute: Execute, output: list[Result]) -> Stop:
    """The commands of the breakpoints that hit, and of those that they lead to."""
    pending = _commands_of(stop, breakpoints)
    for _ in range(_LONGEST_CHAIN):
        if not pending:
            break
        line = pending.pop(0)
        try:
            result = execute(line)
        except RunEnded:
            raise
        except (
            DebuggerError
        ) as error:  # the stop is reported all the same; the rest of the commands is not run
            output.append(Failure(type(error).__name__, f"{line}: {error}", int(exit_code(error))))
            break
        if isinstance(result, Stop):
            output.append(stop)
            stop, pending = result, _commands_of(result, breakpoints)
        else:
            output.append(result)
    return stop


def _commands_of(stop: Stop, breakpoints: Breakpoints) -> list[str]:
    known = {one.id: one for one in breakpoints}
    return [line for id in stop.hit_breakpoint_ids if id in known for line in known[id].commands]
