"""How far a session goes."""

from __future__ import annotations

from pathlib import Path

from lockstep.sessions import Session, SessionError


def last_steps(paths: list[Path]) -> list[tuple[Path, int]]:
    """Those of the sessions that are there, and the last step of each on any branch (-1: none)."""
    found = []
    for path in paths:
        try:
            with Session.open(path) as session:
                last = max(session.steps(branch.id).stop for branch in session.branches()) - 1
        except SessionError:  # a temporary one that is gone
            continue
        found.append((path, last))
    return found
