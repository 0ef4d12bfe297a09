"""The one interface through which the workbench drives a debugger. Free of torch, and of the debugger's own modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from textual.message import Message
from textual.message_pump import MessagePump

from lockstep.workbench.debugger.core.registry import Command
from lockstep.workbench.debugger.host.messages import DebuggerState
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.views.weight_tensor import RankArrays
from lockstep.workbench.views.where import Where

#: The name of threads that wait for a host to end.
CLOSING = "host-close"


class CommandFailed(Exception):
    """A command that was not carried out; the message states why."""


class Outcome(msgspec.Struct, frozen=True):
    """The fields of a command's result (`Result.to_json`) by which the screen decides how to show it."""

    kind: str = ""
    tap: str | None = None
    index: str | Sequence[object] | None = None  # the part of a tensor that was asked for
    verdict: str | None = None
    reason: str | None = None  # of a stop
    holds: bool | None = None  # of an `expect`


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command answered: its text for people, and what kind of result it was."""

    text: str
    outcome: Outcome

    @classmethod
    def of(cls, text: str, result: Mapping[str, object]) -> Reply:
        """From a result as `Result.to_json` has it."""
        return cls(text, msgspec.convert(result, Outcome))


@dataclass(frozen=True, slots=True)
class CommandStage:
    """A part of what a long command does: `done` of `of` passes (0: not counted), in so many seconds until now, or
    until it was over."""

    what: str
    done: int
    of: int
    seconds: float

    @property
    def summary(self) -> str:
        """ "golden reference: 3 of 18"."""
        return f"{self.what}: {self.done} of {self.of}" if self.of else self.what


class Progressed(Message):
    """A pass is done while a command still runs."""

    def can_replace(self, message: Message) -> bool:
        """A burst of steps paints once."""
        return isinstance(message, Progressed)


class Reported(Message):
    """Something for the message line that no command answered."""

    def __init__(self, text: str, *, wrong: bool) -> None:
        super().__init__()
        self.text, self.wrong = text, wrong


class Driver(Protocol):
    """A debugger. One command at a time; `listener` gets `Progressed` and `Reported`."""

    #: Whether a model runs, so that the session grows by commands.
    live: bool
    #: The commands that are carried out as soon as the session is on screen.
    opening: Sequence[str]
    #: The command line that is being carried out.
    running: str | None
    listener: MessagePump | None

    @property
    def stages(self) -> Sequence[CommandStage]:
        """What the command that runs has done so far, the part that is under way last; none where it reports none."""

    @property
    def at(self) -> DebuggerState | None:
        """Where the debugger stood after its last command or event; None before the first."""

    @property
    def unresponsive(self) -> str:
        """Why the debugger shows no sign of life, and since when; "" while it does."""

    @property
    def why_idle(self) -> str:
        """Why no model can be run now; "" where it can."""

    @property
    def why_no_toggle(self) -> str:
        """Why no rule can be changed now; "" where it can."""

    def state(self, where: Where, busy: bool) -> Fact | None:
        """What the status line shows of the engine; `busy`: a command has been running for a while."""

    async def commands(self) -> Sequence[Command]:
        """The registry of the debugger's commands."""

    async def run(self, line: str, where: Where) -> Reply:
        """Carry out a command line while the screen looks at `where`; it means the sequence that is chosen there.
        CommandFailed states why not."""

    async def shares(self, name: str) -> RankArrays:
        """Each running rank's share of a parameter; none where no ranks run or they are at work. CommandFailed."""

    def interrupt(self) -> None:
        """Stop what runs, at an operation boundary."""

    def close(self) -> None:
        """End the debugger and all that it started. The session is kept."""
