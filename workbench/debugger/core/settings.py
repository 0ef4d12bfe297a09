"""What a user has set up beside breakpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.workbench.debugger.answers import Position
from lockstep.workbench.references.request import ReferenceName


@dataclass(slots=True)
class Checkpoint:
    """A position to come back to."""

    id: int
    position: Position
    note: str


@dataclass(slots=True)
class DebuggerSettings:
    """What `set` changes about the debugger itself."""

    golden: str | None = None  # path of the golden session in use
    reference: ReferenceName = "transformers"  # whom `golden` asks
    in_script: bool = False
    displays: list[str] = field(default_factory=list)
