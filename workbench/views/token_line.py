"""The token strip of a branch, read a little at a time: 10,000 steps must not hold up the next question."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from rich.cells import cell_len

from lockstep.sessions.errors import SessionDamaged
from lockstep.sessions.records import SequenceStep
from lockstep.workbench.views.candidates import first_difference, probabilities
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: How many prompt tokens the strip keeps: what came long before the answer is not worth laying out.
_PROMPT_CELLS = 4096
#: Nats at which a token is coloured as strongly as can be.
_HIGH_ENTROPY = 4.0
#: Seconds that one question may take.
_BUDGET = 0.03


@dataclass(frozen=True, slots=True)
class TokenCell:
    """One token of the strip: its visible text, the step that emitted it (None for the prompt), what it can be
    coloured by, each from 0 to 1 (None unknown, NaN where the model's figures are NaN), and whether it differs from
    what it is compared with."""

    label: str
    step: int | None = None
    surprise: float | None = None  # 1 less the probability of the token
    entropy: float | None = None  # of the choice
    divergence: float | None = None  # of the choice from the reference's, or from the other branch's
    differs: bool = False
    fork: bool = False
    token: int | None = None

    def shade(self, colour: str) -> float | None:
        """How strongly the token is coloured by "probability", "entropy" or "divergence"."""
        return {"entropy": self.entropy, "divergence": self.divergence}.get(colour, self.surprise)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The cells in order, and where each begins: `starts[i]` cells from the left, `starts[-1]` the width."""

    cells: tuple[TokenCell, ...] = ()
    starts: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, cells: Sequence[TokenCell]) -> TokenRow:
        """Lay the cells out, one divider after each."""
        return cls(tuple(cells), tuple(accumulate((cell_len(c.label) + 1 for c in cells), initial=0)))


@dataclass(frozen=True, slots=True)
class TokenLine:
    """The strip of one branch; `prompt` cells come before that of step 0. `complete`: nothing left to read. `fed` are
    the labels of the tokens that went in, from position `skipped` on: a prefill may take several steps."""

    tokens: TokenRow = field(default_factory=TokenRow)
    prompt: int = 0
    complete: bool = True
    skipped: int = 0  # tokens of the prompt that the strip leaves out at its beginning
    fed: tuple[str, ...] = ()

    def at(self, step: int) -> int | None:
        """The cell of a step."""
        index = self.prompt + step
        return index if index < len(self.tokens.cells) else None

    def label(self, position: int) -> str:
        """The token at a position, "" where it is not known: the one past those that went in was emitted last."""
        index = position - self.skipped
        if index == len(self.fed):
            return next((cell.label for cell in reversed(self.tokens.cells) if cell.token is not None), "")
        return self.fed[index] if 0 <= index < len(self.fed) else ""


@dataclass(slots=True)
class _Growing:
    """What has been read of a branch's tokens."""

    cells: list[TokenCell] = field(default_factory=list)
    prompt: int = 0
    next_step: int = 0
    skipped: int = 0
    fed: list[str] = field(default_factory=list)
    begun: bool = False  # whether it was fed
    lost: bool = False  # what went in last is not known


class TokenLines:
    """Keeps what was read of each branch, so that a growing session costs only its new steps. `own`: of tokens that
    were given, show the one that the model itself would have chosen."""

    def __init__(self, *, own: bool = False) -> None:
        self._own = own
        self._lines: dict[tuple[object, ...], _Growing] = {}

    def line(self, source: SessionSource, branch: int, seq: int, against: int | None = None) -> TokenLine:
        """A branch's tokens as far as a budget of time reads. They diverge from the golden reference's choices, or
        else from those of the branch `against`."""
        branches = source.session.branches()
        golden = source.golden(Where(branch, source.session.steps(branch).start, seq))
        key = (branch, seq, against, len(branches), None if golden is None else golden.path)
        growing = self._lines.setdefault(key, _Growing())
        steps = source.session.steps(branch)
        forks = {b.fork_step for b in branches if b.parent == branch}
        deadline = time.monotonic() + _BUDGET
        while growing.next_step < steps.stop and time.monotonic() < deadline:
            self._read(source, Where(branch, growing.next_step, seq), growing, against, forks)
            growing.next_step += 1
        complete = growing.next_step >= steps.stop
        shown = growing
        if complete and source.under_way(branch, steps.stop) is not None:
            # A copy: the step may be taken back.
            shown = replace(growing, cells=[*growing.cells], fed=[*growing.fed])
            reads = source.sequence(steps.stop, branch, seq)
            if reads is not None:
                _feed(source, shown, reads)
            shown.cells.append(TokenCell("…", steps.stop))
        row, fed = TokenRow.of(shown.cells), tuple(shown.fed)
        return TokenLine(row, shown.prompt, complete, shown.skipped, fed)

    def _read(
        self, source: SessionSource, where: Where, growing: _Growing, against: int | None, forks: set[int]
    ) -> None:
        try:
            sequence = source.sequence(where.step, where.branch, where.seq)
        except SessionDamaged:
            growing.cells.append(TokenCell("✗", where.step))
            growing.lost = growing.begun = True
            return
        if sequence is not None:
            _feed(source, growing, sequence)
        emitted = sequence.emitted if sequence is not None else None
        if self._own and sequence is not None and emitted is not None and sequence.topk_ids:
            emitted = sequence.topk_ids[0]
        if emitted is None:  # inside a chunked prefill, or the sequence took no part
            growing.cells.append(TokenCell("·" if sequence is None else "…", where.step))
            return
        chance = probabilities(sequence).get(emitted)
        entropy = sequence.entropy if sequence is not None else None
        growing.cells.append(
            TokenCell(
                source.texts.label(emitted),
                where.step,
                None if chance is None else 1 - chance,
                None if entropy is None else _share(entropy / _HIGH_ENTROPY),
                _divergence(source, where, against),
                fork=where.step in forks and where.step > 0,
                token=emitted,
            )
        )


def _feed(source: SessionSource, growing: _Growing, sequence: SequenceStep) -> None:
    """Take the tokens that went in at a step; those of the first are the prompt."""
    if growing.lost and sequence.positions:
        growing.skipped, growing.fed, growing.lost = sequence.positions[0], [], False
    ids = list(sequence.ids)[-_PROMPT_CELLS:]
    growing.fed += [source.texts.label(token) for token in ids]
    if not growing.begun:  # at step 0, or later for one that joins a batch that runs
        growing.begun = True
        growing.cells[:0] = [
            TokenCell(label, token=token) for label, token in zip(growing.fed, ids, strict=True)
        ]
        growing.prompt = len(ids)
        growing.skipped = len(sequence.ids) - len(ids)


def _divergence(source: SessionSource, where: Where, against: int | None) -> float | None:
    """Total variation between the choice at `where` and the reference's (or another branch's), by the candidates
    that both recorded; None where there is nothing to hold it against."""
    golden = source.golden(where)
    theirs = None
    if golden is not None:
        theirs = golden.sequence(where.step, 0, where.seq)
    elif against is not None and where.step in source.session.steps(against):
        theirs = source.sequence(where.step, against, where.seq)
    ours = source.sequence(where.step, where.branch, where.seq)
    p, q = probabilities(ours), probabilities(theirs)
    if not p or not q:
        return None
    return _share(sum(abs(p.get(token, 0.0) - q.get(token, 0.0)) for token in p.keys() | q.keys()) / 2)


def _share(value: float) -> float:
    """1 at most; NaN stays, to be drawn as such."""
    return value if math.isnan(value) else min(1.0, value)


@dataclass(frozen=True, slots=True)
class LinePair:
    """Two branches token for token: cells of the same step are equally wide. `first` is the first step whose tokens
    differ, marked in ours; None: none so far."""

    ours: TokenLine
    theirs: TokenLine
    first: int | None


def compare(ours: TokenLine, theirs: TokenLine) -> LinePair:
    """Lay two lines of the same prompt out under each other."""
    left, right = list(ours.tokens.cells), list(theirs.tokens.cells)
    begin = ours.prompt
    first = first_difference((cell.token for cell in left[begin:]), (cell.token for cell in right[begin:]))
    for i in range(min(len(left), len(right))):
        a, b = left[i], right[i]
        width = max(cell_len(a.label), cell_len(b.label))
        left[i] = replace(_padded(a, width), differs=first is not None and i == begin + first)
        right[i] = _padded(b, width)
    return LinePair(
        replace(ours, tokens=TokenRow.of(left)), replace(theirs, tokens=TokenRow.of(right)), first
    )


def _padded(cell: TokenCell, width: int) -> TokenCell:
    return replace(cell, label=cell.label + " " * (width - cell_len(cell.label)))
