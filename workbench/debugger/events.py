"""What a debugger reports unasked, while a command still runs: a pass is done, how far a comparison is, everything
has stopped, a rank is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct


class StepEvent(Struct, frozen=True, tag="step"):
    """A pass of `branch` is done."""

    branch: int
    step: int


class ProgressEvent(Struct, frozen=True, tag="progress"):
    """What a long command does now: `done` of `of` passes are over; `of` 0: it is not counted."""

    what: str
    done: int
    of: int


class StoppedEvent(Struct, frozen=True, tag="stopped"):
    """All ranks stand still; see `answers.Stop`."""

    reason: str
    description: str
    branch: int
    step: int
    tap: str = ""
    thread_id: int = 0
    hit_breakpoint_ids: Sequence[int] = ()


class RankLostEvent(Struct, frozen=True, tag="rankLost"):
    """The engine is gone. The session is kept; the command `restart` starts the ranks again."""

    message: str


DebuggerEvent = StepEvent | ProgressEvent | StoppedEvent | RankLostEvent
OnEvent = Callable[[DebuggerEvent], None]
