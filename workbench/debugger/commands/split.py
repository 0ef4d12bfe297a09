"""split: this branch beside another one, or beside its golden reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len

from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Result
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.motion import require_step
from lockstep.workbench.debugger.core.registry import Argument, Key, command
from lockstep.workbench.debugger.errors import CommandError, DebuggerError
from lockstep.workbench.views.compared_logits import compared_logits
from lockstep.workbench.views.compared_step import compared_step
from lockstep.workbench.views.sides import GOLDEN, Other, SidesReader, SidesTokens, other_sides, usual_side
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.token_line import TokenLine
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import scalar

#: Steps that are shown before and after the present one.
_AROUND = 8


@dataclass(frozen=True)
class SplitResult(Result):
    """Two sides at one step. `parted` is the first step at which they chose different tokens, None for none so far;
    `first` the first tap of the step that differs beyond rounding."""

    branch: int
    other: Other
    step: int
    names: tuple[str, str]
    tokens: tuple[str, str]
    marked: int  # cells from the left at which the first different token stands
    parted: int | None
    headline: str
    rounding: str
    first: str | None
    divergence: float | None
    kind: ClassVar[str] = "split"

    def _text(self) -> str:
        width = max(map(cell_len, self.names)) + 2
        lines = [
            name + " " * (width - cell_len(name)) + tokens
            for name, tokens in zip(self.names, self.tokens, strict=True)
        ]
        if self.parted is not None:
            lines.append(" " * (width + self.marked) + f"▲ step {self.parted}: first different token")
        lines.append(f"step {self.step}: {self.headline}")
        if self.rounding:
            lines.append(self.rounding)
        if self.divergence is not None:
            lines.append(
                f"D({self.names[0]}‖{self.names[1]}) of the next token ≥ {scalar(self.divergence)} nats"
            )
        return "\n".join(lines)


@command(
    "split", arguments=(Argument("other", "branch", help="a branch, or golden; none: the parent, or the only one"),),
    group="checking", key=Key("vertical_line", "two branches side by side", line="split"),
    help="this branch beside another, or beside golden: tokens, operations, attention, logits, any tensor",
    details="On the screens both are stepped together, and what differs beyond rounding stands on top; here the tokens"
    " are printed, and the first operation of this step that differs.",
)  # fmt: skip
def split(debugger: Debugger, other: str | None) -> SplitResult:
    """Both sides, as far as a few lines report on them."""
    at = require_step(debugger)
    step = min(at.step, debugger.timeline.last(at.branch))
    if step < 0:
        raise DebuggerError(f"step {at.step} is not finished: `next` finishes it")
    debugger.session.refresh()
    source = SessionSource(debugger.session, debugger.texts)
    beside = _named(debugger, source, at.branch, other)
    where = Where(at.branch, step, debugger.sequence)
    tokens = SidesReader().all_tokens(source, where, beside)
    found = compared_step(source, where, beside, tokens.parted)
    lines, marked = _around(tokens, step)
    first = None if found.first is None else debugger.timeline.places.names[found.first]
    apart = compared_logits(source, where, beside, tokens.parted).divergence
    return SplitResult(
        at.branch, beside, step, found.names, lines, marked, tokens.parted, found.headline, found.rounding,
        first, apart,
    )  # fmt: skip


def _named(debugger: Debugger, source: SessionSource, branch: int, name: str | None) -> Other:
    """The other side that a name means, or the usual one."""
    if name == GOLDEN:
        return GOLDEN
    if name is not None:
        other = debugger.timeline.named(name).id
        if other == branch:
            raise CommandError(f"{name} is the branch itself: `split` takes another one, or golden")
        return other
    usual = usual_side(source, branch)
    if usual is None:
        there = [f"`split {side.name}`" for side in other_sides(source, branch)]
        if not there:
            begin = "`toggle` forks another, `golden` records a reference"
            if debugger.session.meta.foreign is not None:  # no live run can be begun from it
                name = clean(debugger.session.path.name, limit=100)
                begin = f"`lockstep check {name} --model MODEL` records a reference"
            raise DebuggerError(f"there is nothing to put beside this branch: {begin}")
        raise CommandError(f"split with which? {', '.join(there)}")
    return usual


def _around(tokens: SidesTokens, step: int) -> tuple[tuple[str, str], int]:
    """The tokens of both sides near a step, and where the first different one stands in them."""
    begin = max(0, step - _AROUND)
    pair, parted = tokens.pair, tokens.parted
    if parted is not None and parted < begin:
        begin = parted
    lines = tuple(_line(side, begin) for side in (pair.ours, pair.theirs))
    before = 0 if parted is None else parted - begin
    cells = pair.ours.tokens.cells[pair.ours.prompt + begin :][:before]
    return (lines[0], lines[1]), sum(cell_len(cell.label) + 1 for cell in cells)


def _line(side: TokenLine, begin: int) -> str:
    cells = side.tokens.cells[side.prompt + begin :][: 2 * _AROUND + 1]
    return "│".join(cell.label for cell in cells)
