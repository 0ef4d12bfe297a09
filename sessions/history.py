"""Which branch recorded a step: branches share the steps before their fork with their parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sessions.errors import SessionError, broken
from sessions.records import Branch


class Forked(Protocol):
    """A branch: it shares the steps before `fork_step` with its parent."""

    @property
    def parent(self) -> int | None:
        """The branch that it left; None for the first."""

    @property
    def fork_step(self) -> int:
        """The first step of its own."""


AnyBranch = TypeVar("AnyBranch", bound=Forked)


def owner_of(branches: Mapping[int, AnyBranch], branch: int, step: int) -> AnyBranch:
    """The branch that runs this step of `branch`: itself, or the ancestor that it shares the step with."""
    found = branches[branch]
    while found.parent is not None and step < found.fork_step:
        found = branches[found.parent]
    return found


class BranchHistory:
    """The branches of a session and the steps each of them has. Immutable."""

    def __init__(self, branches: Sequence[Branch], counts: Sequence[tuple[Any, ...]]) -> None:
        """`counts`: (branch, first, last, number) of each branch's own steps."""
        self.branches = {branch.id: branch for branch in sorted(branches, key=lambda b: b.id)}
        if 0 not in self.branches:
            raise broken("branches", "branch 0 is missing")
        self._own: dict[int, range] = {}
        for branch, first, last, number in counts:
            if branch not in self.branches or last - first + 1 != number:
                raise broken("steps", f"branch {branch} has {number} steps between {first} and {last}")
            self._own[branch] = range(first, last + 1)
        self._segments: dict[int, list[tuple[int, int, int]]] = {}
        for branch in self.branches.values():
            self._segments[branch.id] = self._build(branch)

    def _build(self, branch: Branch) -> list[tuple[int, int, int]]:
        """(owner, first, stop) from step 0 on. A parent has a smaller id, so its list is there already."""
        where = f"branch {branch.id}"
        inherited: list[tuple[int, int, int]] = []
        if branch.parent is not None:
            if branch.parent not in self._segments:
                raise broken(where, f"its parent {branch.parent} is no earlier branch")
            for owner, first, stop in self._segments[branch.parent]:
                if first < branch.fork_step:
                    inherited.append((owner, first, min(stop, branch.fork_step)))
        reached = inherited[-1][2] if inherited else 0
        own = self._own.get(branch.id, range(branch.fork_step, branch.fork_step))
        if reached != branch.fork_step or own.start != branch.fork_step:
            raise broken(
                where,
                f"it forks at step {branch.fork_step}, inherits {reached} steps, goes on at {own.start}",
            )
        return [*inherited, (branch.id, own.start, own.stop)] if own else inherited

    def segments(self, branch: int) -> list[tuple[int, int, int]]:
        """(owner, first, stop) in order: who recorded the steps that make up a branch."""
        if branch not in self._segments:
            known = ", ".join(map(str, list(self.branches)[:20]))
            raise SessionError(f"the session has no branch {branch}; it has {known}.")
        return self._segments[branch]

    def steps(self, branch: int) -> range:
        """All steps of a branch."""
        segments = self.segments(branch)
        return range(segments[0][1], segments[-1][2]) if segments else range(0)

    def own_steps(self, branch: int) -> range:
        """The steps that a branch recorded itself, from its fork on."""
        self.segments(branch)  # SessionError for a branch that there is not
        fork = self.branches[branch].fork_step
        return self._own.get(branch, range(fork, fork))

    def owner(self, branch: int, step: int) -> int:
        """The branch that recorded this step of `branch`."""
        steps = self.steps(branch)
        if step in steps:
            return owner_of(self.branches, branch, step).id
        has = f"steps {steps.start} to {steps.stop - 1}" if steps else "no steps yet"
        raise SessionError(f"branch {branch} has no step {step}; it has {has}.")
