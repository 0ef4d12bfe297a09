"""Which branch recorded a step: branches share the steps before their fork with their parents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from lockstep.sessions.errors import SessionError, broken
from lockstep.sessions.format import read_rows
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.format.schema import PROTECTED_SINCE
from lockstep.sessions.format.totals import Totals
from lockstep.sessions.records import Branch


class Forked(Protocol):
    """A branch: it shares the steps before `fork_step` with its parent."""

    @property
    def parent(self) -> int | None:
        """The branch that it left; None for the first."""

    @property
    def fork_step(self) -> int:
        """The first step of its own."""


AnyBranch = TypeVar("AnyBranch", bound=Forked)

#: Branches whose segments are kept: those of a long chain of forks are many.
_KEPT = 8


def owner_of(branches: Mapping[int, AnyBranch], branch: int, step: int) -> AnyBranch:
    """The branch that runs this step of `branch`: itself, or the ancestor that it shares the step with."""
    found = branches[branch]
    while found.parent is not None and step < found.fork_step:
        found = branches[found.parent]
    return found


class BranchHistory:
    """The branches of a session and the steps each of them has. Takes time in proportion to their number."""

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
        self._stops: dict[int, int] = {}  # by branch: the step after its last
        for one in self.branches.values():
            self._stops[one.id] = self._stop(one)
        self._segments: dict[int, list[tuple[int, int, int]]] = {}  # of the branches asked for last

    @classmethod
    def read(cls, archive: Archive, totals: Totals) -> BranchHistory:
        """The history of the session that `archive` reads."""
        branches = read_rows.records(read_rows.branch, archive.rows("branches"), "branches", archive.meter)
        crcs = "sum(crc)" if archive.version >= PROTECTED_SINCE else "0"
        found = archive.query(
            f"SELECT branch, min(step), max(step), count(*), {crcs} FROM steps GROUP BY branch", what="steps"
        )
        counts = [tuple(read_rows.integer(value, "steps") for value in row[:4]) for row in found]
        totals.expect("branches", len({branch.id for branch in branches}))
        totals.expect("steps", sum(row[3] for row in counts), sum(row[4] for row in found))
        history = cls(branches, counts)
        archive.meter.keep(history, branches.nbytes)
        return history

    def _stop(self, branch: Branch) -> int:
        """Where the branch ends, after checking that it goes on from its fork without a gap. A parent has a smaller
        id, so where it ends is known."""
        where, fork = f"branch {branch.id}", branch.fork_step
        if branch.parent is not None and branch.parent not in self._stops:
            raise broken(where, f"its parent {branch.parent} is no earlier branch")
        inherits = 0 if branch.parent is None else max(0, min(self._stops[branch.parent], fork))
        own = self._own.get(branch.id, range(fork, fork))
        if inherits != fork or own.start != fork:
            raise broken(where, f"it forks at step {fork}, inherits {inherits} steps, goes on at {own.start}")
        return own.stop

    def segments(self, branch: int) -> list[tuple[int, int, int]]:
        """(owner, first, stop) in order: who recorded the steps that make up a branch."""
        stop = self.steps(branch).stop
        if branch not in self._segments:
            found: list[tuple[int, int, int]] = []
            at: Branch | None = self.branches[branch]
            while at is not None and stop > 0:
                if at.id in self._own and stop > at.fork_step:
                    found.append((at.id, at.fork_step, stop))
                stop = min(stop, at.fork_step)
                at = None if at.parent is None else self.branches[at.parent]
            while len(self._segments) >= _KEPT:
                self._segments.pop(next(iter(self._segments)))
            self._segments[branch] = found[::-1]
        return self._segments[branch]

    def steps(self, branch: int) -> range:
        """All steps of a branch."""
        if branch not in self._stops:
            known = ", ".join(map(str, list(self.branches)[:20]))
            raise SessionError(f"the session has no branch {branch}; it has {known}.")
        return range(self._stops[branch])

    def own_steps(self, branch: int) -> range:
        """The steps that a branch recorded itself, from its fork on."""
        stop = self.steps(branch).stop
        return range(self.branches[branch].fork_step, stop)

    def owner(self, branch: int, step: int) -> int:
        """The branch that recorded this step of `branch`."""
        steps = self.steps(branch)
        if step in steps:
            segments = self.segments(branch)
            return segments[bisect_right(segments, step, key=lambda one: one[1]) - 1][0]
        has = f"steps {steps.start} to {steps.stop - 1}" if steps else "no steps yet"
        raise SessionError(f"branch {branch} has no step {step}; it has {has}.")
