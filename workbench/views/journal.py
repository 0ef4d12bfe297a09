"""The journal: what was done and what happened, and the branches as a tree."""

from __future__ import annotations

from dataclasses import dataclass

from sessions.text import clean
from workbench.views.sentinels import is_stop
from workbench.views.source import Source
from workbench.views.where import Where


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event, its text safe to print."""

    id: int
    branch: int
    step: int
    kind: str
    text: str
    stop: bool = False


@dataclass(frozen=True, slots=True)
class BranchNode:
    """A branch in the tree: how deep, its own steps, its rules in words."""

    id: int
    name: str
    depth: int
    fork_step: int
    steps: int
    rules: str
    last_tokens: str


@dataclass(frozen=True, slots=True)
class Journal:
    """Everything, in order."""

    entries: tuple[JournalEntry, ...]
    branches: tuple[BranchNode, ...]


#: The newest events that are kept on screen.
_MOST = 5000


def journal(source: Source, where: Where) -> Journal:
    """The journal of the whole session."""
    events = source.session.events()[-_MOST:]
    entries = tuple(
        JournalEntry(e.id, e.branch, e.step, clean(e.kind, limit=12), clean(e.text, limit=300), is_stop(e))
        for e in events
    )
    return Journal(entries, tuple(_tree(source, where.seq)))


def _tree(source: Source, seq: int) -> list[BranchNode]:
    branches = source.session.branches()
    found: list[BranchNode] = []

    def visit(parent: int | None, depth: int) -> None:
        for branch in branches:
            if branch.parent != parent or (parent is None and branch.parent is not None):
                continue
            steps = source.session.steps(branch.id)
            rules = ", ".join(
                f"{clean(str(k), limit=40)}={clean(str(v), limit=40)}" for k, v in branch.rules.items()
            )
            tokens = [source.sequence(step, branch.id, seq) for step in steps[-6:]]
            last = "".join(
                source.texts.label(s.emitted) for s in tokens if s is not None and s.emitted is not None
            )
            name = clean(branch.name, limit=40)
            found.append(BranchNode(branch.id, name, depth, branch.fork_step, len(steps), rules, last))
            if depth < 32:
                visit(branch.id, depth + 1)

    visit(None, 0)
    return found
