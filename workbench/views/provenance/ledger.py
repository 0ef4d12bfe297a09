"""The ledger of a paged cache: which token of which request each slot holds, and which reads are of a wrong row.

A row belongs to a request where it was computed for the same tokens up to its place, by whichever request: so a
prefix that two requests share is no foreign row. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.meta import CacheMeta
from lockstep.workbench.views.provenance.accesses import (
    NOT_WRITTEN,
    PADDING,
    UNKNOWN,
    CachedRow,
    CachePass,
    CacheRead,
)

#: Slots in the blocks that a ledger keeps: a stranger's table may name any number.
MOST_SLOTS = 1 << 24
#: Wrong accesses that are kept: the first are what matters.
MOST_WRONG = 2_000
_WORD = (1 << 64) - 1


class Misuse(StrEnum):
    """What is wrong with an access to the cache."""

    POSITION = "position"  # a row has another position than its place in the request
    LENGTH = "length"  # attention is given more or fewer rows than the request has
    MISPLACED = "misplaced"  # the row was written to another slot than the block table states
    PADDING = "padding"  # a row that fills up a batch was written over it
    CLOBBERED = "clobbered"  # a misplaced row was written over it
    OVERWRITTEN = "overwritten"  # another request wrote over it, in a block that the reader has in use
    FOREIGN = "foreign"  # the block table names another request's block
    LOST = "lost"  # the block table names a block without the row, which is elsewhere
    COLLISION = "collision"  # the prefix cache gave a block of other tokens
    EVICTED = "evicted"  # the prefix cache gave a block that had been given to another by then
    UNWRITTEN = "unwritten"  # nobody has written the slot
    STALE = "stale"  # the slot holds what another request left there
    REJECTED = "rejected"  # the row is of a token that was taken back


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """A row that was written in pass `number` to `slot`, where the block table states `expected`."""

    number: int
    request: int
    place: int
    position: int
    token: int
    slot: int
    expected: int
    chain: int

    @property
    def misplaced(self) -> bool:
        return self.slot != self.expected

    @property
    def unsure(self) -> bool:
        """Whether the tokens before it are not known."""
        return self.request != PADDING and self.chain == 0

    @property
    def shifted(self) -> bool:
        """Whether the model is given another position."""
        return self.position not in (UNKNOWN, self.place)


@dataclass(frozen=True, slots=True)
class WrongAccess:
    """In pass `number`, `request` meets at `places` (first and last) what is not its own, first in `slot` of blocks of
    `block_size`. `owner` wrote what is there first, `last_owner` at the last place; `own` is the row that should be,
    where there is one. `given` and `right`: a length, position or token as it is, and as it should be. The pass
    computes the rows from `start` to before `stop` of the request."""

    kind: Misuse
    group: int
    number: int
    request: int
    places: tuple[int, int]
    slot: int = NOT_WRITTEN
    owner: CacheWrite | None = None
    last_owner: CacheWrite | None = None
    own: CacheWrite | None = None
    given: int = UNKNOWN
    right: int = UNKNOWN
    block_size: int = 1
    start: int = 0
    stop: int = 0

    @property
    def block(self) -> int:
        return self.slot // self.block_size


@dataclass(slots=True)
class _Known:
    """A request as far as it is known: its tokens, for each the identity of all up to it (0: not known), where its rows
    were written last by group, and the first place that it computed itself. It has had its blocks in use since that
    pass, when it had that many rows: it begins again where it has fewer than before."""

    tokens: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    written: dict[tuple[int, int], CacheWrite] = field(default_factory=dict)
    began: int = UNKNOWN
    since: int = UNKNOWN
    computed: int = UNKNOWN

    def read(self, number: int, computed: int) -> None:
        """It reads its rows in a pass, before which it had `computed`."""
        if self.since == UNKNOWN or computed < self.computed:
            self.since = number
        self.computed = computed

    def left_out(self, first: int, stop: int, size: int) -> Iterator[int]:
        """Places of which no row was ever computed, behind some that were. Whole blocks may have come from a cache,
        where the request begins once more."""
        ends = False  # whether the gap ends within a block
        for place in range(stop - 1, max(first, self.began) - 1, -1) if self.began != UNKNOWN else ():
            if self.tokens[place] != UNKNOWN:
                ends = place % size != 0
            elif ends:
                yield place

    def put(self, place: int, token: int) -> None:
        """Another token than before takes back what follows it."""
        size = len(self.tokens)
        if place < size and self.tokens[place] == token:
            return
        del self.tokens[place:], self.chain[place:]
        for _ in range(size, place):  # nobody reported these
            self.tokens.append(UNKNOWN)
            self.chain.append(0)
        before = self.chain[-1] if place else 1
        self.tokens.append(token)
        self.chain.append(chained(before, token) if before else 0)


def chained(before: int, token: int) -> int:
    """The identity of tokens up to one, from that of those before it (1: there are none)."""
    mixed = (before ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _WORD
    return (mixed ^ (mixed >> 31)) or 1


@dataclass(slots=True)
class _SlotPool:
    """The blocks of a group that were written: the number of the write that each slot has (0: none), and its chain."""

    size: int
    index: dict[int, int] = field(default_factory=dict)
    writes: NDArray[np.int64] = field(default_factory=lambda: np.zeros((1, 0), np.int64))
    chains: NDArray[np.uint64] = field(default_factory=lambda: np.zeros((1, 0), np.uint64))
    had: set[tuple[int, int]] = field(default_factory=set)  # (slot, chain) that were there once

    def put(self, slot: int, number: int, chain: int) -> None:
        block, offset = divmod(slot, self.size)
        row = self.index.setdefault(block, len(self.index) + 1)
        if row >= len(self.writes) or not self.writes.shape[1]:
            self._grow(row)
        self.writes[row, offset], self.chains[row, offset] = number, chain
        self.had.add((slot, chain))

    def held(self, blocks: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Writes and chains of the slots of blocks, in order."""
        rows = [self.index.get(block, 0) for block in blocks]
        if not self.writes.shape[1]:
            self._grow(0)
        return self.writes[rows].reshape(-1), self.chains[rows].reshape(-1)

    def _grow(self, row: int) -> None:
        count = max(16, 2 * (row + 1))
        if count * self.size > MOST_SLOTS:
            raise ValueError(f"blocks of {self.size} slots, {count} of them, are more than is looked at")
        for name in ("writes", "chains"):
            old = getattr(self, name)
            new = np.zeros((count, self.size), old.dtype)
            new[: len(old), : old.shape[1]] = old
            setattr(self, name, new)


class SlotLedger:
    """Follows the passes of one rank in order. `wrong` is what was found so far."""

    def __init__(self, groups: Sequence[CacheMeta]) -> None:
        self.groups = tuple(groups)
        self.wrong: list[WrongAccess] = []
        self._requests: dict[int, _Known] = {}
        self._pools = [_SlotPool(one.block_size) for one in groups]
        self._writes: list[CacheWrite] = []  # number n is the n-1-th
        self._missed: dict[tuple[int, int], CacheWrite] = {}  # by group and slot: what went elsewhere
        self._spans: dict[int, range] = {}  # by request of the pass at hand the places that it computes

    def follow(self, one: CachePass) -> None:
        """A pass: what it writes, then what it reads, as attention has both of each layer. ValueError for one that no
        cache of these groups can have made."""
        if len(one.reads) > len(self.groups) or any(len(row.slots) != len(self.groups) for row in one.rows):
            raise ValueError(f"pass {one.number} has other groups than the {len(self.groups)} of its cache")
        for request, tokens in one.cached.items():
            known = self._known(request)
            for place, token in enumerate(tokens):
                known.put(place, token)
        for row in one.rows:
            if row.request != PADDING:
                known = self._known(row.request)
                known.put(row.place, row.token)
                known.began = row.place if known.began == UNKNOWN else known.began
        for read in {read.request: read for reads in one.reads for read in reads}.values():
            self._known(read.request).read(one.number, read.computed)
        self._spans = {}
        for row in one.rows:
            first = self._spans[row.request].start if row.request in self._spans else row.place
            self._spans[row.request] = range(first, row.place + 1)
        for group, reads in enumerate(one.reads):
            tables = {read.request: read for read in reads}
            for row in one.rows:
                self._write(one.number, group, row, tables.get(row.request))
            for read in reads:
                self._length(one, group, read)
                self._read(one.number, group, read)

    def origin(self, group: int, slot: int) -> CacheWrite | None:
        """Who wrote what a slot holds; None where nobody did."""
        block, offset = divmod(slot, self.groups[group].block_size)
        number = int(self._pools[group].held([block])[0][offset])
        return self._writes[number - 1] if number else None

    def owners(self, group: int) -> Iterator[CacheWrite]:
        """What each slot that was written holds now."""
        numbers = self._pools[group].writes
        yield from (self._writes[number - 1] for number in numbers[numbers > 0].tolist())

    def _known(self, request: int) -> _Known:
        return self._requests.setdefault(request, _Known())

    def _write(self, number: int, group: int, row: CachedRow, table: CacheRead | None) -> None:
        slot, chain, expected = row.slots[group], 0, row.slots[group]
        if row.request != PADDING:
            chain = self._requests[row.request].chain[row.place]
            expected = self._slot(group, table, row.place)
            if expected == UNKNOWN:
                expected = slot
        one = CacheWrite(
            number, row.request, row.place, row.position, row.token, slot, expected, chain
        )  # fmt: skip
        if row.request != PADDING:
            self._requests[row.request].written[group, row.place] = one
            if one.shifted:
                self._note(
                    WrongAccess(
                        Misuse.POSITION, group, number, row.request, (row.place, row.place), slot, own=one,
                        given=row.position, right=row.place,
                    )
                )  # fmt: skip
        if one.misplaced:
            self._missed[group, expected] = one
        if slot >= 0:
            self._writes.append(one)
            self._pools[group].put(slot, len(self._writes), chain)

    def _slot(self, group: int, table: CacheRead | None, place: int) -> int:
        """Where a row is by the block table."""
        block, offset = divmod(place, self.groups[group].block_size)
        if table is None or block >= len(table.blocks):
            return UNKNOWN
        return table.blocks[block] * self.groups[group].block_size + offset

    def _length(self, one: CachePass, group: int, read: CacheRead) -> None:
        right = read.computed + sum(row.request == read.request for row in one.rows)
        if read.computed != UNKNOWN and read.length != right:
            places = (min(read.length, right), max(read.length, right) - 1)
            self._note(
                WrongAccess(
                    Misuse.LENGTH, group, one.number, read.request, places,
                    self._slot(group, read, places[0]), given=read.length, right=right,
                )
            )  # fmt: skip

    def _read(self, number: int, group: int, read: CacheRead) -> None:
        known, pool = self._known(read.request), self._pools[group]
        window = self.groups[group].window
        first = 0 if window is None else max(0, read.computed - window + 1)
        stop = min(read.length, len(known.tokens), len(read.blocks) * pool.size)
        if first >= stop:
            return
        writes, chains = (held[first:stop] for held in pool.held(read.blocks))
        expected = np.array(known.chain[first:stop], np.uint64)
        wrong = np.flatnonzero((writes == 0) | ((chains != expected) & (expected != 0)))
        left_out = [place - first for place in known.left_out(first, stop, pool.size)]
        wrong = np.union1d(wrong, left_out).astype(np.int64)
        self._note_reads(number, group, read, [(first + at, int(writes[at])) for at in wrong.tolist()])

    def _note_reads(self, number: int, group: int, read: CacheRead, wrong: Sequence[tuple[int, int]]) -> None:
        """Wrong rows as spans of neighbours that are wrong alike."""
        spans: list[WrongAccess] = []
        known = self._known(read.request)
        for place, written in wrong:
            owner = self._writes[written - 1] if written else None
            own, token = known.written.get((group, place)), known.tokens[place]
            if owner is not None and owner.unsure and (owner.place, owner.token) == (place, token):
                continue
            slot = self._slot(group, read, place)
            if (
                owner is None and own is None
            ):  # a prefix that is shared, of which the other request's row went elsewhere
                own = self._missed.get((group, slot))
            kind = self._kind(read.request, group, place, slot, owner, own)
            if kind is None:
                continue
            last = spans[-1] if spans else None
            if (
                last is not None
                and last.places[1] == place - 1
                and (last.kind, _of(last.owner)) == (kind, _of(owner))
            ):
                spans[-1] = replace(last, places=(last.places[0], place), last_owner=owner)
            else:
                reported = UNKNOWN if owner is None else owner.token
                spans.append(
                    WrongAccess(
                        kind,
                        group,
                        number,
                        read.request,
                        (place, place),
                        slot,
                        owner,
                        owner,
                        own,
                        reported,
                        token,
                    )
                )
        for one in spans:
            self._note(one)

    def _kind(
        self,
        request: int,
        group: int,
        place: int,
        slot: int,
        owner: CacheWrite | None,
        own: CacheWrite | None,
    ) -> Misuse | None:
        """Why the row in `slot` is not `own`, that of `place`; None where its position is: reported already."""
        if own is None:
            return self._kind_of_unwritten(request, group, place, slot, owner)
        if own.shifted:
            return None
        if own.misplaced:
            return Misuse.MISPLACED
        if own.slot != slot:
            return Misuse.LOST if owner is None else Misuse.FOREIGN
        if owner is None or owner == own:
            return Misuse.REJECTED
        if owner.request == PADDING:
            return Misuse.PADDING
        return Misuse.CLOBBERED if owner.misplaced or owner.shifted else Misuse.OVERWRITTEN

    def _kind_of_unwritten(
        self, request: int, group: int, place: int, slot: int, owner: CacheWrite | None
    ) -> Misuse:
        """The same of a row that the request did not compute."""
        known = self._requests[request]
        if owner is None:
            return Misuse.UNWRITTEN
        if owner.request == PADDING:
            return Misuse.PADDING
        if owner.misplaced or owner.shifted:
            return Misuse.CLOBBERED
        if place >= known.began != UNKNOWN:
            return Misuse.STALE
        if (slot, known.chain[place]) in self._pools[group].had:
            return Misuse.OVERWRITTEN if owner.number > known.since else Misuse.EVICTED
        return Misuse.COLLISION if owner.place == place else Misuse.FOREIGN

    def _note(self, one: WrongAccess) -> None:
        if len(self.wrong) < MOST_WRONG:
            size, span = self.groups[one.group].block_size, self._spans.get(one.request, range(0))
            self.wrong.append(replace(one, block_size=size, start=span.start, stop=span.stop))


def _of(owner: CacheWrite | None) -> int | None:
    return None if owner is None else owner.request
