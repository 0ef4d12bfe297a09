"""The branches of a session: where each left its parent, and under which rules."""

from __future__ import annotations

from dataclasses import dataclass

from sessions import Session
from sessions.text import clean


@dataclass(frozen=True, slots=True)
class BranchLine:
    """One branch. It shares the first `fork_step` of its `steps` with its parent; `rules` are (name, value)."""

    id: int
    name: str
    parent: int | None = None
    parent_name: str = ""
    fork_step: int = 0
    steps: int = 0
    rules: tuple[tuple[str, str], ...] = ()

    @property
    def rule_texts(self) -> tuple[str, ...]:
        """The rules as NAME=VALUE."""
        return tuple(f"{name}={value}" for name, value in self.rules)


def branch_lines(session: Session) -> tuple[BranchLine, ...]:
    """Every branch, main first."""
    names = {branch.id: clean(branch.name, limit=60) for branch in session.branches()}
    return tuple(
        BranchLine(
            branch.id,
            names[branch.id],
            branch.parent,
            "" if branch.parent is None else names[branch.parent],
            branch.fork_step,
            len(session.steps(branch.id)),
            tuple((clean(str(k), limit=40), clean(str(v), limit=40)) for k, v in branch.rules.items()),
        )
        for branch in session.branches()
    )
