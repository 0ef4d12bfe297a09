"""What follows a stop: it is journalled and told, its breakpoints' commands run, displays are shown."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import RankError
from workbench.debugger.answers import Failure, Message, Result, Stop
from workbench.debugger.errors import DebuggerError, RunEnded
from workbench.debugger.events import StoppedEvent
from workbench.debugger.failures import exit_code

if TYPE_CHECKING:
    from workbench.debugger.core.debugger import Debugger

#: Commands that breakpoint commands may run in a chain before it is taken for a loop.
_LONGEST_CHAIN = 1000


def arrive(debugger: Debugger, stop: Stop) -> Stop:
    """Carry out what a stop brings with it. Returns the last stop of the chain, with all that was said."""
    _tell(debugger, stop)
    if debugger.quiet:
        return stop  # whoever runs it sees to the rest
    output: list[Result] = []
    stop = _run_commands(debugger, stop, output)
    with debugger.quietly():
        for shown in debugger.settings.displays:
            try:
                output.append(debugger.execute(shown))
            except DebuggerError as error:
                output.append(Message(f"{shown}: {error}"))
    return replace(stop, output=(*stop.output, *output)) if output else stop


def caught(debugger: Debugger, error: RankError) -> Stop | None:
    """The stop that `catch error` makes of a lost rank; None where nobody waits for it."""
    catch = debugger.breakpoints.sentinels().get("error")
    if catch is None or not debugger.breakpoints.count([catch.id]):
        return None
    rank = re.search(r"rank (\d+)", str(error))
    return debugger.stop(
        "exception", f"{catch.describe()}: {error}; `restart` starts the engine again",
        thread_id=int(rank[1]) if rank else 0, hit_breakpoint_ids=[catch.id],
    )  # fmt: skip


def _tell(debugger: Debugger, stop: Stop) -> None:
    debugger.last_stop = stop
    debugger.journal("stop", stop.description, data=stop.to_json())
    debugger.events(
        StoppedEvent(
            stop.reason, stop.description, stop.branch, stop.step, stop.tap, stop.thread_id,
            stop.hit_breakpoint_ids,
        )
    )  # fmt: skip


def _run_commands(debugger: Debugger, stop: Stop, output: list[Result]) -> Stop:
    """The commands of the breakpoints that hit, and of those that they lead to."""
    pending = _commands_of(debugger, stop)
    for _ in range(_LONGEST_CHAIN):
        if not pending:
            break
        line = pending.pop(0)
        try:
            with debugger.quietly():
                result = debugger.execute(line)
        except RunEnded:
            raise
        except DebuggerError as error:  # the stop is told all the same; the rest of the commands is not run
            output.append(Failure(type(error).__name__, f"{line}: {error}", int(exit_code(error))))
            break
        if isinstance(result, Stop):
            output.append(stop)
            stop, pending = result, _commands_of(debugger, result)
        else:
            output.append(result)
    return stop


def _commands_of(debugger: Debugger, stop: Stop) -> list[str]:
    known = {one.id: one for one in debugger.breakpoints}
    return [line for id in stop.hit_breakpoint_ids if id in known for line in known[id].commands]
