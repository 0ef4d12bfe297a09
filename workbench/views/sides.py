"""Two sides of a session to look at beside each other: a branch, and another branch or the golden reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.sessions.alignment import input_mismatch
from lockstep.sessions.errors import SessionError
from lockstep.workbench.views.branches import BranchLine, branch_lines
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.token_line import LinePair, TokenLines, compare
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.plain_text import plural

GOLDEN: Literal["golden"] = "golden"
#: What stands on the other side: a branch by its number, or the golden reference.
Other = int | Literal["golden"]


@dataclass(frozen=True, slots=True)
class OtherSide:
    """What a branch can be put beside; `summary` is what there is to know before."""

    other: Other
    name: str
    summary: str


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """The same step of two runs. `why_not` states why nothing in it can be compared, "" where it can; without the step
    on the other side `lacks_step` is set."""

    ours: SessionSource
    here: Where
    theirs: SessionSource
    there: Where
    names: tuple[str, str]
    why_not: str = ""
    lacks_step: bool = False


@dataclass(frozen=True, slots=True)
class SidesTokens:
    """The tokens of both sides under each other, as far as they were read. `parted`: the first step in which they chose
    different tokens of their own: what comes after it read different tokens. Of a golden reference the tokens are its
    own choices, which it did not follow: it reads what the branch reads."""

    pair: LinePair
    parted: int | None
    complete: bool

    def covers(self, step: int) -> bool:
        """Whether it is known if different tokens went into a step."""
        read = all(line.at(step) is not None for line in (self.pair.ours, self.pair.theirs))
        return read or (self.parted is not None and self.parted < step)


def other_sides(source: SessionSource, branch: int) -> tuple[OtherSide, ...]:
    """Every other branch, and the golden reference of this one where there is one."""
    found = [_of_branch(line) for line in branch_lines(source.session) if line.id != branch]
    golden = source.reference(branch)
    if golden is not None:
        steps = plural(len(golden.session.steps(0)), "step")
        found.append(OtherSide(GOLDEN, GOLDEN, f"the reference ({golden.meta.config.dtype}), {steps}"))
    return tuple(found)


def _of_branch(line: BranchLine) -> OtherSide:
    rules = line.summary("no fault")
    parent = f", from {line.parent_name} at step {line.fork_step}" if line.parent is not None else ""
    return OtherSide(line.id, line.name, f"{plural(line.steps, 'step')}{parent}: {rules}")


def usual_side(source: SessionSource, branch: int) -> Other | None:
    """What a branch is put beside unless somebody asks otherwise: the one it was forked from, else the only one that
    there is; None where that has to be asked."""
    parent = next(line.parent for line in branch_lines(source.session) if line.id == branch)
    if parent is not None:
        return parent
    found = other_sides(source, branch)
    return found[0].other if len(found) == 1 else None


def sides(source: SessionSource, where: Where, other: Other, parted: int | None = None) -> Sides:
    """Both sides of the step at `where`. `parted`: see `SidesTokens`. SessionError where there is no such side."""
    theirs, branch, name = _other(source, where.branch, other)
    ours = next(line.name for line in branch_lines(source.session) if line.id == where.branch)
    both = Sides(source, where, theirs, replace(where, branch=branch), (ours, name))
    steps = theirs.session.steps(branch)
    if where.step not in steps:
        end = f"ends at step {steps.stop - 1}" if steps else "has no steps yet"
        more = ": `golden` records it up to where the branch stands" if other == GOLDEN else ""
        return replace(both, why_not=f"{name} {end}{more}", lacks_step=True)
    if parted is not None and where.step > parted and other != GOLDEN:
        return replace(
            both,
            why_not=f"different tokens went in from step {parted + 1} on: step {parted} is the last to compare",
        )
    reported = source.sequence(where.step, where.branch, where.seq)
    counterpart = theirs.sequence(where.step, branch, where.seq)
    if reported is None or counterpart is None:
        side = both.names[1] if counterpart is None else both.names[0]
        return replace(both, why_not=f"sequence {where.seq} takes no part in step {where.step} of {side}")
    mismatch = input_mismatch(reported, counterpart)
    if mismatch is not None:
        return replace(both, why_not=f"{mismatch[0]} that go in differ: {mismatch[1]}")
    return both


def last_step(source: SessionSource, where: Where, other: Other) -> int:
    """The last step of the other side; -1 where it has none."""
    theirs, branch, _ = _other(source, where.branch, other)
    return theirs.session.steps(branch).stop - 1


def _other(source: SessionSource, branch: int, other: Other) -> tuple[SessionSource, int, str]:
    """The other side's source, its branch there, and what it is called."""
    if other == GOLDEN:
        golden = source.reference(branch)
        if golden is None:
            raise SessionError(
                "there is no golden reference of this branch here: `golden` records one (it needs the model)"
            )
        return golden, 0, GOLDEN
    line = next((line for line in branch_lines(source.session) if line.id == other), None)
    if line is None:
        raise SessionError(f"there is no branch {other}: `branches` lists them")
    return source, line.id, line.name


class SidesReader:
    """Reads the tokens of two sides a little at a time, and keeps what was read."""

    def __init__(self) -> None:
        self._ours, self._theirs = TokenLines(), TokenLines()
        self._golden = TokenLines(own=True)

    def tokens(self, source: SessionSource, where: Where, other: Other) -> SidesTokens:
        """The tokens of the branch at `where` and of the other side, as far as a budget of time reads them."""
        theirs, branch, _ = _other(source, where.branch, other)
        mine = self._ours.line(source, where.branch, where.seq, branch if theirs is source else None)
        lines = self._theirs if theirs is source else self._golden
        yours = lines.line(theirs, branch, where.seq)
        pair = compare(mine, yours)
        return SidesTokens(pair, pair.first, mine.complete and yours.complete)

    def all_tokens(self, source: SessionSource, where: Where, other: Other) -> SidesTokens:
        """The same, read to the end."""
        return read_all(lambda: self.tokens(source, where, other))


def read_all(read: Callable[[], SidesTokens]) -> SidesTokens:
    """Read until there is nothing left to read."""
    while not (found := read()).complete:
        pass
    return found
