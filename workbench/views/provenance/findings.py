"""What a session reports on its engine's paged cache: reads of rows that are not the request's own, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import Session
from lockstep.sessions.meta import CACHE_READS, CACHE_ROWS, ForeignMeta
from lockstep.workbench.judgements.cause import numbers_in_words
from lockstep.workbench.views.provenance.accesses import NOT_WRITTEN, CachePass, passes_of
from lockstep.workbench.views.provenance.ledger import (
    CacheWrite,
    Misuse,
    SlotLedger,
    WrongAccess,
)
from lockstep.workbench.words.plain_text import plural


@dataclass(frozen=True, slots=True)
class CacheFinding:
    """Accesses that are wrong for one reason, the first of them first, on `ranks`, in `layers`."""

    accesses: tuple[WrongAccess, ...]
    ranks: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def first(self) -> WrongAccess:
        return self.accesses[0]

    @property
    def kind(self) -> Misuse:
        return self.first.kind

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests that meet them."""
        return tuple(sorted({one.request for one in self.accesses}))

    @property
    def passes(self) -> tuple[int, ...]:
        return tuple(sorted({one.number for one in self.accesses}))

    def in_words(self) -> str:
        """What happened, by its first access."""
        return _WORDS[self.first.kind](self.first)

    def others(self) -> list[str]:
        """The first access of each further request."""
        first = {one.request: one for one in reversed(self.accesses)}
        return [_WORDS[one.kind](one) for one in first.values() if one.request != self.first.request]


@dataclass(frozen=True, slots=True)
class CacheAudit:
    """What there is to know of a session's cache: the `findings`; how many rows were written in how many `passes`;
    why that is not known (`lacking`), "" where it is."""

    findings: tuple[CacheFinding, ...] = ()
    rows: int = 0
    passes: int = 0
    lacking: str = ""


def cache_passes(session: Session, rank: int, branch: int = 0) -> Iterator[CachePass]:
    """What a rank did to its cache, pass by pass. ValueError for tables that are none."""
    for step in session.steps(branch):
        rows, reads = (_table(session, tap, step, rank, branch) for tap in (CACHE_ROWS, CACHE_READS))
        if rows is not None and reads is not None:
            yield from passes_of(rows, reads)


def followed(session: Session, rank: int, branch: int = 0) -> tuple[SlotLedger, int, int]:
    """The ledger of a rank behind the last step, the passes that it followed, and the rows that they wrote."""
    ledger, passes, rows = SlotLedger(_foreign(session).caches), 0, 0
    for one in cache_passes(session, rank, branch):
        ledger.follow(one)
        passes, rows = passes + 1, rows + len(one.rows)
    return ledger, passes, rows


def cache_audit(session: Session, branch: int = 0) -> CacheAudit | None:
    """Whose rows the run's requests read; None where the session does not state where they lie."""
    foreign = _foreign(session)
    if not foreign.caches or not session.has_tap(CACHE_ROWS):
        return None
    by_rank: dict[int, list[WrongAccess]] = {}
    passes = rows = 0
    try:
        for rank in foreign.ranks:
            ledger, passes, rows = followed(session, rank, branch)
            by_rank[rank] = ledger.wrong
    except ValueError as error:
        return CacheAudit(lacking=str(error))
    return CacheAudit(tuple(_findings(foreign, by_rank)), rows, passes)


def _foreign(session: Session) -> ForeignMeta:
    return session.meta.foreign or ForeignMeta()


def _table(session: Session, tap: str, step: int, rank: int, branch: int) -> NDArray[np.int64] | None:
    found = (
        session.capture(tap, step=step, rank=rank, branch=branch, slice="") if session.has_tap(tap) else None
    )
    return found.array if found is not None and found.dtype == "int64" else None


def _findings(foreign: ForeignMeta, by_rank: dict[int, list[WrongAccess]]) -> Iterator[CacheFinding]:
    """Accesses drawn together by what went wrong, in the order in which it shows."""
    found: dict[tuple[Misuse, int], list[tuple[int, WrongAccess]]] = {}
    for rank, wrong in by_rank.items():
        for one in wrong:
            found.setdefault(_reason(one), []).append((rank, one))
    for given in sorted(found.values(), key=lambda given: given[0][1].number):
        first = min(rank for rank, _ in given)
        groups = sorted({one.group for _, one in given})
        yield CacheFinding(
            tuple(one for rank, one in given if rank == first),
            tuple(sorted({rank for rank, _ in given})),
            tuple(sorted({layer for group in groups for layer in foreign.caches[group].layers})),
        )


def _reason(one: WrongAccess) -> tuple[Misuse, int]:
    """What is the same in accesses of one cause: its kind, and how far off a slot, position or length is."""
    if one.kind == Misuse.LOST:  # as another request's: it is the table that is another
        return Misuse.FOREIGN, 0
    if one.kind in (Misuse.POSITION, Misuse.LENGTH):
        return one.kind, one.given - one.right
    written = one.owner if one.kind == Misuse.CLOBBERED else one.own if one.kind == Misuse.MISPLACED else None
    if written is None or not written.misplaced:
        return one.kind, 0
    away = written.slot == NOT_WRITTEN
    return Misuse.MISPLACED, NOT_WRITTEN if away else 2 * (written.slot - written.expected)


def request_name(number: int) -> str:
    """A request as the session numbers it, or one that it has not."""
    return f"sequence {number}" if number >= 0 else f"a request that is not in the session ({-number - 1})"


def _at(places: Sequence[int]) -> str:
    first, last = min(places), max(places)
    return f"position {first}" if first == last else f"positions {numbers_in_words(range(first, last + 1))}"


def _its(one: WrongAccess) -> str:
    """Who wrote what is read, and what."""
    first, last = one.owner, one.last_owner or one.owner
    if first is None or last is None:
        return "nobody has written"
    return f"{request_name(first.request)} wrote (its {_at((first.place, last.place))}, pass {first.number})"


def _misplaced(one: WrongAccess) -> str:
    own = one.own
    assert own is not None, "what was put elsewhere was written"
    where = f"{request_name(one.request)}, position {own.place}, pass {own.number}"
    there = f"slot {own.expected}, which attention reads, "
    there += "was never written" if one.owner is None else f"holds what {_its(one)}"
    if own.slot == NOT_WRITTEN:
        return f"a key and value are not written, where the block table has slot {own.expected} ({where}); {there}"
    apart = own.slot - own.expected
    how = f"{plural(abs(apart), 'slot')} too {'far' if apart > 0 else 'early'}"
    return f"keys and values are written {how}: slot {own.slot} instead of {own.expected} ({where}); {there}"


def _own_block(one: WrongAccess) -> str:
    return "" if one.own is None else f"; its own rows begin in block {one.own.slot // one.block_size}"


def _foreign_block(one: WrongAccess) -> str:
    own = one.owner is not None and one.owner.request == one.request
    whose = "another of its own blocks" if own else "another request's block"
    return (
        f"{request_name(one.request)} reads block {one.block} ({_at(one.places)}), which {_its(one)}: {whose}"
        f"{_own_block(one)}"
    )


def _lost(one: WrongAccess) -> str:
    return (
        f"{request_name(one.request)} reads block {one.block} ({_at(one.places)}), which nobody has written"
        f"{_own_block(one)}"
    )


def _collision(one: WrongAccess) -> str:
    other = (
        "another beginning"
        if one.given == one.right
        else f"other tokens ({one.given}, not {one.right}, at the first)"
    )
    return (
        f"{request_name(one.request)} takes block {one.block} from the prefix cache ({_at(one.places)}), which "
        f"{_its(one)} for {other}: two prefixes are taken for one"
    )


def _evicted(one: WrongAccess) -> str:
    return (
        f"{request_name(one.request)} takes block {one.block} from the prefix cache ({_at(one.places)}), which has "
        f"been given to another since: what is there {_its(one)}: stale after eviction"
    )


def _overwritten(one: WrongAccess) -> str:
    own = one.owner is not None and one.owner.request == one.request
    return (
        f"{request_name(one.request)} still reads block {one.block} ({_at(one.places)}), over which {_its(one)}: a "
        f"block in use was given to {'it once more' if own else 'another request'}"
    )


def _clobbered(one: WrongAccess) -> str:
    owner: CacheWrite | None = one.owner
    assert owner is not None, "something was written there"
    return (
        f"a row of {request_name(owner.request)} that belongs in slot {owner.expected} is written to slot {owner.slot} "
        f"(pass {owner.number}), over position {one.places[0]} of {request_name(one.request)}"
    )


def _padding(one: WrongAccess) -> str:
    number = one.number if one.owner is None else one.owner.number
    return (
        f"padding is written to slot {one.slot} (pass {number}), which {request_name(one.request)} reads as position "
        f"{one.places[0]}"
    )


def _unwritten(one: WrongAccess) -> str:
    return f"{request_name(one.request)} reads slot {one.slot} ({_at(one.places)}), which nobody has written"


def _stale(one: WrongAccess) -> str:
    return (
        f"{request_name(one.request)} reads slot {one.slot} ({_at(one.places)}), which {_its(one)}: it never wrote "
        "there itself, so that the row is stale"
    )


def _rejected(one: WrongAccess) -> str:
    return (
        f"{request_name(one.request)} still reads the row of token {one.given} at {_at(one.places)}, which was taken "
        f"back for {one.right}: a rejected draft's"
    )


def _position(one: WrongAccess) -> str:
    where = f"the row of place {one.right} of {request_name(one.request)} has position {one.given} (pass {one.number})"
    return f"positions are not those of the tokens: {where}" + (
        ": they begin again behind the rows that come from the cache" if one.given == 0 else ""
    )


def _length(one: WrongAccess) -> str:
    return (
        f"attention is given a length by which {request_name(one.request)} has {plural(one.given, 'row')}, "
        f"where it has {one.right} (pass {one.number})"
    )


_WORDS = {
    Misuse.POSITION: _position,
    Misuse.LENGTH: _length,
    Misuse.MISPLACED: _misplaced,
    Misuse.PADDING: _padding,
    Misuse.CLOBBERED: _clobbered,
    Misuse.OVERWRITTEN: _overwritten,
    Misuse.FOREIGN: _foreign_block,
    Misuse.LOST: _lost,
    Misuse.COLLISION: _collision,
    Misuse.EVICTED: _evicted,
    Misuse.UNWRITTEN: _unwritten,
    Misuse.STALE: _stale,
    Misuse.REJECTED: _rejected,
}
