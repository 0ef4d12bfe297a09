"""What goes wrong between a user and the debugger: each one clear line, with what to do next."""

from __future__ import annotations

from lockstep.sessions.text import clean


class DebuggerError(Exception):
    """A command that cannot be carried out as it stands; nothing has changed. The message may quote a session."""

    def __init__(self, message: str) -> None:
        super().__init__(clean(message, newlines=True))


class CommandError(DebuggerError):
    """A command that is not understood. `caret` is the column of `line` at which it went wrong."""

    def __init__(self, message: str, line: str = "", caret: int | None = None) -> None:
        super().__init__(message)
        self.line, self.caret = line, caret

    def to_text(self) -> str:
        """The message, and the line with a caret under the fault."""
        if self.caret is None or not self.line:
            return str(self)
        return f"{self}\n  {self.line}\n  {' ' * self.caret}^"


class NotCaptured(DebuggerError):
    """The session does not hold the answer, and there is no engine to ask."""


class NeedsEngine(DebuggerError):
    """The command runs the model, and this is a replay."""


class EngineGone(NeedsEngine):
    """The command runs the model, and a rank was lost."""


class Interrupted(DebuggerError):
    """The user has interrupted what was going on."""


class RunEnded(DebuggerError):
    """The user, or a script, has asked to quit."""


class InternalError(DebuggerError):
    """An exception that nobody expected, raised by a command: a defect of the program."""

    def __init__(self, message: str, where: str, *, engine_lost: bool) -> None:
        """`where`: in words, where its traceback is."""
        after = "the engine is lost: `restart` starts it again" if engine_lost else "the debugger goes on"
        super().__init__(f"{message} (a defect of lockstep; its traceback {where}; {after})")


class ReplayMismatch(DebuggerError):
    """A pass that was run again did not give what the session recorded."""

    def __init__(self, branch: int, step: int, place: int, tap: str, ranks: tuple[int, ...]) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"step {step} run again differs from the session at {tap}, rank {names}")
        self.branch, self.step, self.place, self.tap, self.ranks = branch, step, place, tap, ranks
