"""The branches of a session: where each left its parent, and under which rules."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.sessions import Session
from lockstep.sessions.text import clean
from lockstep.workbench.words.plain_text import one_line


@dataclass(frozen=True, slots=True)
class BranchLine:
    """One branch. It shares the first `fork_step` of its `steps` with its parent; `rules` are (name, value).
    `engine` is the other engine that was recorded, "" for ours: of its rules nothing is known."""

    id: int
    name: str
    parent: int | None = None
    parent_name: str = ""
    fork_step: int = 0
    steps: int = 0
    rules: tuple[tuple[str, str], ...] = ()
    engine: str = ""

    @property
    def rule_texts(self) -> tuple[str, ...]:
        """The rules as NAME=VALUE."""
        return tuple(f"{name}={value}" for name, value in self.rules)

    def summary(self, correct: str) -> str:
        """Its rules in words: "NAME=VALUE, …", else the engine that is not ours, else `correct`."""
        return ", ".join(self.rule_texts) or (f"recorded from {self.engine}" if self.engine else correct)


def branch_lines(session: Session) -> tuple[BranchLine, ...]:
    """Every branch, main first."""
    engine = engine_name(session)
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
            engine,
        )
        for branch in session.branches()
    )


def engine_name(session: Session) -> str:
    """The other engine that this is a recording of, how it ran, and what is not there; "" for ours."""
    meta, foreign = session.meta, session.meta.foreign
    if foreign is None:
        return ""
    ranks = f"{len(foreign.ranks)} of {session.ranks} ranks" if 0 < len(foreign.ranks) < session.ranks else ""
    only = "statistics only" if foreign.statistics_only else ""
    reported = (meta.source or "another engine", foreign.mode, ranks, only)
    return ", ".join(one_line(text, 60) for text in reported if text)
