"""What the debugger adds to the list of operations: where the ranks stand, and what stops them there."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.workbench.debugger.host.messages import DebuggerState
from lockstep.workbench.views.where import Where

#: Where all ranks stand; a breakpoint; a watchpoint (a condition at a tap).
STANDS, BREAK, WATCH = "▶", "◆", "◇"


@dataclass(frozen=True, slots=True)
class Marks:
    """Of the step that is looked at: the tap at which the debugger stands ("" between two steps, or elsewhere), and by
    tap the mark of a breakpoint (`BREAK`) or a watchpoint (`WATCH`)."""

    stands: str = ""
    stops: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, at: DebuggerState | None, where: Where) -> Marks:
        """The marks at `where` of a debugger that stands at `at`. Catchpoints look at every tap: they mark none."""
        if at is None:
            return cls()
        here = (at.branch, at.step) == (where.branch, where.step)
        stops = {tap: WATCH for one in at.breakpoints if one.kind == "watch" for tap in one.places}
        stops |= {tap: BREAK for one in at.breakpoints if one.kind == "break" for tap in one.places}
        return cls((at.tap or "") if here else "", stops)
