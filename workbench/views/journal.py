"""The journal: what was done and what happened, and the branches as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.sessions import Event, Session
from lockstep.sessions.text import clean
from lockstep.workbench.views.branches import BranchLine, branch_lines
from lockstep.workbench.views.sentinels import is_stop
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: The newest events that are kept on screen.
_MOST = 5000
#: The characters of an event's text that are shown.
_LONGEST = 20_000
#: The tokens that stand beside a branch, and how deep the tree may be.
_LAST_TOKENS, _DEEPEST = 6, 32


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event, its text safe to print."""

    id: int
    branch: int
    branch_name: str
    step: int
    kind: str
    text: str
    stop: bool = False
    tap: str = ""  # where it stopped inside the step


@dataclass(frozen=True, slots=True)
class BranchNode:
    """A branch in the tree: how deep it is, and the last tokens of the sequence on screen."""

    line: BranchLine
    depth: int
    last_tokens: str


@dataclass(frozen=True, slots=True)
class Journal:
    """Everything, in order."""

    entries: tuple[JournalEntry, ...]
    branches: tuple[BranchNode, ...]


def journal(source: SessionSource, where: Where) -> Journal:
    """The journal of the whole session."""
    entries = journal_entries(source.session, source.session.events()[-_MOST:])
    return Journal(entries, tuple(_tree(source, where.seq)))


def journal_entries(session: Session, events: list[Event]) -> tuple[JournalEntry, ...]:
    """Some events of a session."""
    names = {line.id: line.name for line in branch_lines(session)}
    return tuple(
        JournalEntry(
            event.id,
            event.branch,
            names.get(event.branch, f"branch {event.branch}"),
            event.step,
            clean(event.kind, limit=20),
            clean(event.text, newlines=True, limit=_LONGEST),
            is_stop(event),
            _tap(event),
        )
        for event in events
    )


def _tap(event: Event) -> str:
    tap = event.data.get("tap") if event.kind == "stop" and isinstance(event.data, dict) else None
    return clean(tap, limit=120) if isinstance(tap, str) else ""


def _tree(source: SessionSource, seq: int) -> Iterator[BranchNode]:
    lines = branch_lines(source.session)

    def visit(parent: int | None, depth: int) -> Iterator[BranchNode]:
        for line in lines:
            if line.parent == parent:
                yield BranchNode(line, depth, _last_tokens(source, line.id, seq))
                if depth < _DEEPEST:
                    yield from visit(line.id, depth + 1)

    return visit(None, 0)


def _last_tokens(source: SessionSource, branch: int, seq: int) -> str:
    steps = source.session.steps(branch)[-_LAST_TOKENS:]
    reported = (source.sequence(step, branch, seq) for step in steps)
    return "".join(source.texts.label(s.emitted) for s in reported if s is not None and s.emitted is not None)
