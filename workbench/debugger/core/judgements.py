"""What `golden` found of a branch."""

from __future__ import annotations

from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.judgements.golden_event import GoldenEvent, last_golden_event


def last_judgement(debugger: Debugger) -> GoldenEvent | None:
    """What `golden` found on this branch last, None where it was never asked."""
    branch = debugger.position.branch
    if branch in debugger.judged:  # a recording that has stopped keeps nothing
        return debugger.judged[branch]
    debugger.session.refresh()
    return last_golden_event(debugger.session, branch)
