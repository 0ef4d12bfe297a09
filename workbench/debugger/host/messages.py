"""The protocol between a host and its client. Torch-free, and free of the debugger itself.

A frame of the client is a `RequestFrame`; one of the host an `AnswerFrame`, which has the request's number, or an
event. Requests are carried out one after another; only an `InterruptRequest` overtakes. Both sides validate what they
receive: a frame that is none of these ends the connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from lockstep.engine.ranks.wire import WireArray
from lockstep.workbench.debugger.answers import JsonObject
from lockstep.workbench.debugger.core.registry import Command
from lockstep.workbench.debugger.events import DebuggerEvent

#: How often a host shows that it lives.
HEARTBEAT_SECONDS = 1.0

# --- what is common ------------------------------------------------------------------------------------


class BranchState(Struct, frozen=True):
    """One branch: it shares the steps before `fork_step` with its parent, and has run the steps before `steps`."""

    id: int
    name: str
    parent: int | None
    fork_step: int
    forked_at: int | None
    rules: dict[str, str]
    steps: int


class BreakpointState(Struct, frozen=True):
    """An enabled breakpoint or watchpoint; `places`: the taps that it looks at."""

    id: int
    kind: Literal["break", "watch"]
    places: Sequence[int]


class DebuggerState(Struct, frozen=True):
    """Where the debugger stands, for a status line. All else is read from the session file, a commit a step."""

    branch: int
    step: int  # -1: nothing was run
    sequence: int  # the chosen one, which every command means
    tap: str | None  # inside the step: the operation that has just passed
    last: int  # the branch's last step
    live: bool
    lost: str | None  # why the engine is gone
    rules: dict[str, str]
    branches: Sequence[BranchState]
    session: str
    breakpoints: Sequence[BreakpointState] = ()


class ErrorInfo(Struct, frozen=True):
    """Why a request failed. `kind` is the exception's class; `line` and `caret` point into a command that was not
    understood."""

    kind: str
    message: str
    exit_code: int
    line: str | None = None
    caret: int | None = None


# --- client → host -------------------------------------------------------------------------------------


class LineRequest(Struct, frozen=True, tag="command"):
    """Carry out a command line, of `sequence` (None: the one that is chosen). Answered by a CommandAnswer."""

    line: str
    sequence: int | None = None


class CallRequest(Struct, frozen=True, tag="call"):
    """Carry out a command given by name and arguments. Answered by a CommandAnswer."""

    command: str
    arguments: Mapping[str, str | int | bool | None] = field(default_factory=dict)


class StateRequest(Struct, frozen=True, tag="state"):
    """Answered by a StateAnswer."""


class RegistryRequest(Struct, frozen=True, tag="registry"):
    """Answered by a RegistryAnswer."""


class TensorRequest(Struct, frozen=True, tag="tensor"):
    """A tap's tensor at the present step: one rank's, or (None) the whole; of a sequence, or (None) the chosen one.
    Answered by a TensorAnswer."""

    tap: str
    rank: int | None = None
    seq: int | None = None


class WeightRequest(Struct, frozen=True, tag="weight"):
    """Each rank's share of a parameter, by its checkpoint name. Answered by a WeightAnswer."""

    name: str


class InterruptRequest(Struct, frozen=True, tag="interrupt"):
    """Stop what runs, at an operation boundary. Answered at once by a DoneAnswer."""


class CloseRequest(Struct, frozen=True, tag="close"):
    """End the host. Answered by a DoneAnswer, the last."""


Request = (
    LineRequest | CallRequest | StateRequest | RegistryRequest | TensorRequest | WeightRequest
    | InterruptRequest | CloseRequest
)  # fmt: skip


class RequestFrame(Struct, frozen=True):
    """A request and the number that its answer bears."""

    id: int
    request: Request


# --- host → client -------------------------------------------------------------------------------------


class CommandAnswer(Struct, frozen=True, tag="command"):
    """What a command answered: `result` as `Result.to_json` has it, its text, the state after it."""

    result: JsonObject
    text: str
    state: DebuggerState


class StateAnswer(Struct, frozen=True, tag="state"):
    """Where the debugger stands."""

    state: DebuggerState


class RegistryAnswer(Struct, frozen=True, tag="registry"):
    """Every command there is."""

    commands: Sequence[Command]


class TensorAnswer(Struct, frozen=True, tag="tensor"):
    """A tensor, what there is to report about it, and where it is from: "session", "live" or "re-executed"."""

    tensor: WireArray
    note: str
    source: str
    step: int


class WeightAnswer(Struct, frozen=True, tag="weight"):
    """Each rank's share."""

    tensors: Sequence[WireArray]


class DoneAnswer(Struct, frozen=True, tag="done"):
    """It was done, and there is nothing to report."""


class ErrorAnswer(Struct, frozen=True, tag="error"):
    """The request failed."""

    error: ErrorInfo
    state: DebuggerState | None = None


Answer = CommandAnswer | StateAnswer | RegistryAnswer | TensorAnswer | WeightAnswer | DoneAnswer | ErrorAnswer


class AnswerFrame(Struct, frozen=True, tag="answer"):
    """The answer to the request of that number."""

    id: int
    answer: Answer


class ReadyEvent(Struct, frozen=True, tag="ready"):
    """The model is loaded, or the recording opened."""

    session: str
    state: DebuggerState
    model: str
    tp: int
    replay: bool
    pid: int
    rank_pids: Sequence[int] = ()


class StartFailedEvent(Struct, frozen=True, tag="startFailed"):
    """It could not be started; the host ends."""

    error: ErrorInfo


class OutputEvent(Struct, frozen=True, tag="output"):
    """Something for the user to read."""

    text: str
    level: str = "warning"


class HeartbeatEvent(Struct, frozen=True, tag="heartbeat"):
    """The host lives: sent every `HEARTBEAT_SECONDS`, whatever it is busy with. The client keeps it to itself."""


class ClosedEvent(Struct, frozen=True, tag="closed"):
    """The last event, the client's own: the connection is gone. `message` is "" where it was asked to close."""

    message: str


_SentEvent = ReadyEvent | StartFailedEvent | OutputEvent | DebuggerEvent
HostFrame = AnswerFrame | HeartbeatEvent | _SentEvent
HostEvent = _SentEvent | ClosedEvent
