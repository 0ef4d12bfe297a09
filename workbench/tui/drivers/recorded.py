"""A debugger on a recording, as the screens see one: it stands where they look. Heavy to import; see `replay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.engine.errors import EngineError
from lockstep.sessions.errors import SessionError
from lockstep.workbench.debugger.answers import Position, Result, Stop
from lockstep.workbench.debugger.core.registry import Command, commands, parse_line
from lockstep.workbench.debugger.errors import DebuggerError
from lockstep.workbench.debugger.host.messages import DebuggerState
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.debugger.host.state import state_of
from lockstep.workbench.tui.drivers.port import CommandFailed, Outcome, Reply
from lockstep.workbench.tui.navigator import next_stop
from lockstep.workbench.views.sentinels import stops
from lockstep.workbench.views.where import Where

_ERRORS = (DebuggerError, EngineError, SessionError)


class RecordedDebugger:
    """Used from one thread, but for `interrupt`."""

    def __init__(self, path: Path) -> None:
        try:
            self._debugger = open_replay(path)
        except _ERRORS as error:
            raise CommandFailed(str(error)) from error

    def commands(self) -> Sequence[Command]:
        """The registry."""
        return list(commands().values())

    def run(self, line: str, where: Where) -> tuple[Reply, DebuggerState]:
        """Carry out a command line as one who stands at `where`; the answer, and where that led. CommandFailed."""
        try:
            spec, _ = parse_line(line)
            self._debugger.sequence = where.seq
            self._stand_at(where, inside=spec.inside)
            return self._carry_out(spec, line, where), state_of(self._debugger)
        except _ERRORS as error:
            raise CommandFailed(str(error)) from error

    def interrupt(self) -> None:
        """Stop what runs, between two steps."""
        self._debugger.interrupt()

    def close(self) -> None:
        """Close the session."""
        self._debugger.close()

    def _stand_at(self, where: Where, *, inside: bool) -> None:
        """A recorded step is shown whole: a motion inside it begins at the operation that is looked at, every other
        command at the end of the step, unless the debugger stands in the step already."""
        at = self._debugger.position
        if inside:
            self._debugger.position = Position(where.branch, where.step, where.tap)
            return
        begun = at.step >= 0 or self._debugger.timeline.last(where.branch) < 0  # it begins before step 0
        if not begun or (at.branch, max(at.step, 0)) != (where.branch, where.step):
            self._debugger.position = Position(where.branch, where.step)

    def _carry_out(self, spec: Command, line: str, where: Where) -> Reply:
        debugger = self._debugger
        armed = any(one.enabled for one in debugger.breakpoints)
        if spec.name in ("continue", "reverse-continue") and not armed:
            return self._recorded_stop(ahead=spec.name == "continue")
        result = debugger.execute(line)
        if spec.inside and spec.name != "finish" and debugger.position.place is None:
            # Where steps are shown whole the end of one is no place of its own: on to the next operation.
            result = debugger.execute(spec.name)
        return Reply.of(self._text(result, where), result.to_json())

    def _recorded_stop(self, *, ahead: bool) -> Reply:
        """Without a breakpoint of its own, a replay continues to where the run was stopped."""
        at = self._debugger.position
        steps = {event.step for event in stops(self._debugger.session, at.branch)}
        step = next_stop(steps, at.step, 1 if ahead else -1)
        if step is None:
            text = "no further stop on this branch" if ahead else "no stop before this one"
            return Reply(text, Outcome("message"))
        self._debugger.position = Position(at.branch, step)
        return Reply("", Outcome("stopped"))

    def _text(self, result: Result, where: Where) -> str:
        """A plain motion has nothing to report: the screen shows where it led."""
        plain = isinstance(result, Stop) and result.reason == "step" and not result.output
        return "" if plain and not _looked_at(self._debugger.position, where) else result.to_text()


def _looked_at(at: Position, where: Where) -> bool:
    """Whether a screen at `where` shows the position."""
    same = (at.branch, max(at.step, 0)) == (where.branch, where.step)
    return same and at.place in (None, where.tap)
