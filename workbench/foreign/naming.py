"""Which request each row belongs to, where a dump does not state it: from positions, order, and what logits chose.

A row at position 0 begins a sequence; a row at position p goes on with the live sequence that has p rows. Of several
such sequences it is the one whose last logits chose this very token; else the order in their last batch decides, as
long as there is a row for each of them. Whether two rows of neighbouring positions are a chunk of one request or a
token of two is shown by how many rows of logits the pass has, by the tokens, or by both having read a token a pass
before. What cannot be settled is an error: a row in the wrong sequence would be a difference that nobody made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.workbench.foreign.heads import PassHead
from lockstep.workbench.foreign.passes import ForeignDumpError


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence as far as it has come. `start` is above 0 where its beginning was not recorded; `chosen` is what the
    logits of its last row chose, None: not known; `touched` the last pass that computed it, with `rows` rows of it, and
    `before` of them in the pass before."""

    name: str
    start: int
    ids: list[int] = field(default_factory=list)
    chosen: int | None = None
    touched: int = -1
    rows: int = 0
    before: int = 0

    @property
    def next(self) -> int:
        return self.start + len(self.ids)

    def holds(self, position: int, token: int) -> bool:
        """Whether that row was computed before."""
        return self.start <= position < self.next and self.ids[position - self.start] == token


@dataclass(slots=True)
class _Naming:
    """The sequences that are live, in the order of the last batch. `last_only`: the run has the logits of each
    request's last row alone. `matched` and `missed` count tokens that logits chose, and did not."""

    eos: frozenset[int]
    last_only: bool
    live: list[_Live] = field(default_factory=list)
    started: int = 0
    matched: int = 0
    missed: int = 0

    def name(self, number: int, head: PassHead) -> tuple[str, ...]:
        """The request of each row of pass `number`."""
        batch: list[_Live] = []
        of: list[_Live] = []
        apart = self._apart(head)
        for row, (token, position) in enumerate(zip(head.ids, head.positions, strict=True)):
            one = self._of(number, head, row, batch, apart)
            if one not in batch:
                batch.append(one)
                one.before, one.rows = one.rows, 0
            del one.ids[max(0, position - one.start) :]
            one.ids.append(token)
            one.touched, one.rows = number, one.rows + 1
            of.append(one)
        names = tuple(one.name for one in of)
        chosen = head.chosen(names)
        for row, one in enumerate(of):
            one.chosen = chosen.get(row)
        self.live = [*batch, *(one for one in self.live if one not in batch)]
        return names

    def _apart(self, head: PassHead) -> set[int] | None:
        """The rows that are another request's than the row before, though its position is the next: as many as the
        logits have rows, one a request, beyond the stretches of positions. None where that does not settle it."""
        if not self.last_only or not head.tops:
            return None
        doubtful, chosen = set[int](), set[int]()
        for row, position in enumerate(head.positions):
            if position and row and head.positions[row - 1] + 1 == position:
                waiting = [one for one in self.live if one.next == position]
                doubtful |= {row} if waiting else set()
                chosen |= {row} if any(one.chosen == head.ids[row] for one in waiting) else set()
        more = len(head.tops) - head.runs
        if more <= 0 or more >= len(doubtful):
            return doubtful if more > 0 else set()
        return chosen if len(chosen) == more else None

    def _of(self, number: int, head: PassHead, row: int, batch: list[_Live], apart: set[int] | None) -> _Live:
        token, position = head.ids[row], head.positions[row]
        current = batch[-1] if batch else None
        waiting = [one for one in self.live if one not in batch]
        if position == 0:
            return self._again(head, row, waiting) or self._start(0)
        ready = [one for one in waiting if one.next == position]
        going = [one for one in ready if one.chosen is None or one.chosen not in self.eos] or ready
        if (
            current is not None
            and current.next == position
            and (not going or self._is_chunk(number, head, row, current, going, apart))
        ):
            return current
        going = [one for one in going if one.chosen == token] or self._may_read(going)
        if going:
            return self._choose(number, head, row, going, current is None or current.next != position)
        repeated = [one for one in waiting if one.holds(position, token)]
        if len({tuple(one.ids[: position - one.start + 1]) for one in repeated}) > 1:
            raise _unsettled(number, position, len(repeated))
        return max(repeated, key=lambda one: one.touched) if repeated else self._start(position)

    def _start(self, position: int) -> _Live:
        self.started += 1
        return _Live(f"#{self.started - 1}", position)

    def _again(self, head: PassHead, row: int, waiting: Sequence[_Live]) -> _Live | None:
        """The sequence that is computed once more from its beginning (it was preempted): all that it had read, at most
        one token more."""
        stop = row + 1
        while stop < len(head.ids) and head.positions[stop] == head.positions[stop - 1] + 1:
            stop += 1
        run = list(head.ids[row:stop])
        for one in waiting:
            decoded = one.start == 0 and len(one.ids) > 1 and one.chosen is not None
            if decoded and run[: len(one.ids)] == one.ids and run[len(one.ids) :] in ([], [one.chosen]):
                return one
        return None

    def _choose(self, number: int, head: PassHead, row: int, going: Sequence[_Live], sure: bool) -> _Live:
        """One of the sequences that wait for this position. Where several fit the token they are in the order of the
        batch; where none does, it is the order of all, as long as each gets a row."""
        chosen = [one for one in going if one.chosen == head.ids[row]]
        if sure and len(going) == 1 and going[0].rows == 1 and going[0].chosen is not None:
            self.matched, self.missed = self.matched + len(chosen), self.missed + 1 - len(chosen)
        if chosen:
            return chosen[0]
        rest = head.positions[row:]
        rows = 1 + sum(at == rest[0] and rest[i] + 1 != at for i, at in enumerate(rest[1:]))
        ordered = len(going) <= rows and len({one.touched for one in going}) == 1
        if not ordered and len({tuple(one.ids) for one in going}) > 1:
            raise _unsettled(number, head.positions[row], len(going))
        return going[0]

    def _may_read(self, going: Sequence[_Live]) -> list[_Live]:
        """Those that may read a token that their logits did not choose: in a greedy run such as are in their prompt."""
        greedy = self.matched and not self.missed
        return [one for one in going if not greedy or one.rows > 1 or one.chosen is None]

    def _is_chunk(
        self, number: int, head: PassHead, row: int, current: _Live, going: Sequence[_Live], apart: set[int] | None
    ) -> bool:  # fmt: skip
        """Whether a row that may be the next of the chunk before it is that: `going` wait for the same position."""
        if apart is not None:
            return row not in apart
        if head.top_rows is not None and len(head.top_rows) < len(head.ids):
            return row - 1 not in head.top_rows
        if any(one.chosen == head.ids[row] for one in going):
            return False
        if not self._may_read(going):
            return True
        if current.before == 1 and current.rows == 1:  # it reads a token a pass
            return False
        after = head.positions[row] + 1
        follows = after in head.positions[row + 1 : row + 2]
        if follows and all(one.rows == 1 for one in going) and all(one.next != after for one in self.live):
            return True  # nobody else could read what follows
        raise _unsettled(number, head.positions[row], len(going) + 1)


def named_rows(heads: Sequence[PassHead], eos: Sequence[int]) -> list[tuple[str, ...]]:
    """The request of each row of each pass, named "#0", "#1", … in the order in which they begin. ForeignDumpError
    where a row cannot be shown to be one's or another's."""
    naming = _Naming(frozenset(eos), any(0 < len(head.tops) < len(head.ids) for head in heads))
    return [naming.name(number, head) for number, head in enumerate(heads)]


def _unsettled(number: int, position: int, count: int) -> ForeignDumpError:
    return ForeignDumpError(
        f"pass {number}: a row at position {position} may go on with any of {count} requests, and neither their logits "
        "nor the order shows which. Have the engine's dump name the request of each row (`tape.step(ids, positions, "
        "requests)`), or record one request at a time"
    )
