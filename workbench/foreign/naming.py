"""Which request each row belongs to, where a dump does not tell: from positions, order, and what logits chose.

A row at position 0 begins a sequence; a row at position p goes on with the live sequence that has p rows. Of several
such sequences it is the one whose last logits chose this very token; else the order in the batch decides, as long as
there is a row for each of them. What cannot be settled is an error: a row in the wrong sequence would be a difference
that nobody made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.foreign.heads import PassHead
from workbench.foreign.passes import ForeignDumpError


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence as far as it has come. `start` is above 0 where its beginning was not recorded; `chosen` is what the
    logits of its last row chose, None: not known; `touched` the last pass that computed it."""

    name: str
    start: int
    ids: list[int] = field(default_factory=list)
    chosen: int | None = None
    touched: int = -1

    @property
    def next(self) -> int:
        return self.start + len(self.ids)

    def holds(self, position: int, token: int) -> bool:
        """Whether that row was computed before."""
        return self.start <= position < self.next and self.ids[position - self.start] == token


@dataclass(slots=True)
class _Naming:
    """The sequences that are live, in the order of the last batch."""

    eos: frozenset[int]
    live: list[_Live] = field(default_factory=list)
    started: int = 0

    def name(self, number: int, head: PassHead) -> tuple[str, ...]:
        """The request of each row of pass `number`."""
        batch: list[_Live] = []
        of: list[_Live] = []
        for row, (token, position) in enumerate(zip(head.ids, head.positions, strict=True)):
            one = self._of(number, head, row, batch)
            if one not in batch:
                batch.append(one)
            del one.ids[max(0, position - one.start) :]
            one.ids.append(token)
            one.touched = number
            of.append(one)
        names = tuple(one.name for one in of)
        chosen = head.chosen(names)
        for row, one in enumerate(of):
            one.chosen = chosen.get(row)
        self.live = [*batch, *(one for one in self.live if one not in batch)]
        return names

    def _of(self, number: int, head: PassHead, row: int, batch: list[_Live]) -> _Live:
        token, position = head.ids[row], head.positions[row]
        current = batch[-1] if batch else None
        waiting = [one for one in self.live if one not in batch]
        if position == 0:
            return self._again(head, row, waiting) or self._start(0)
        ready = [one for one in waiting if one.next == position]
        going = [one for one in ready if one.chosen is None or one.chosen not in self.eos] or ready
        if current is not None and current.next == position and (
            not going or _is_chunk(number, head, row, going)
        ):  # fmt: skip
            return current
        if going:
            return self._choose(number, head, row, going)
        repeated = [one for one in waiting if one.holds(position, token)]
        rewound = repeated or [one for one in waiting if one.start <= position < one.next]
        if len(rewound) > 1 and not repeated:
            raise _unsettled(number, position, len(rewound))
        return max(rewound, key=lambda one: one.touched) if rewound else self._start(position)

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

    def _choose(self, number: int, head: PassHead, row: int, going: Sequence[_Live]) -> _Live:
        """One of the sequences that wait for this position. Where several fit the token they are in the order of the
        batch; where none does, it is the order of all, as long as each gets a row."""
        chosen = [one for one in going if one.chosen == head.ids[row]]
        if chosen:
            return chosen[0]
        recent = [one for one in going if one.touched >= number - 1] or list(going)
        rows = sum(position == head.positions[row] for position in head.positions[row:])
        if len(recent) > rows and len({tuple(one.ids) for one in recent}) > 1:
            raise _unsettled(number, head.positions[row], len(recent))
        return recent[0]


def _is_chunk(number: int, head: PassHead, row: int, going: Sequence[_Live]) -> bool:
    """Whether a row that may be the next of the chunk before it is that: `going` wait for the same position."""
    ends = head.ends()
    if ends is not None:
        return row - 1 not in ends
    if any(one.chosen == head.ids[row] for one in going):
        return False
    if all(one.chosen is not None for one in going):
        return True
    alone = row < 2 or head.positions[row - 2] + 1 != head.positions[row - 1]
    return not alone or going[0].touched < number - 1


def named_rows(heads: Sequence[PassHead], eos: Sequence[int]) -> list[tuple[str, ...]]:
    """The request of each row of each pass, named "#0", "#1", … in the order in which they begin. ForeignDumpError
    where a row cannot be told to be one's or another's."""
    naming = _Naming(frozenset(eos))
    return [naming.name(number, head) for number, head in enumerate(heads)]


def _unsettled(number: int, position: int, count: int) -> ForeignDumpError:
    return ForeignDumpError(
        f"pass {number}: a row at position {position} may go on with any of {count} requests, and neither their logits "
        "nor the order tells which. Have the engine's dump name the request of each row (`tape.step(ids, positions, "
        "requests)`), or record one request at a time"
    )
