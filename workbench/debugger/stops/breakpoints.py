"""Breakpoints, watchpoints and catchpoints: what to stop at, forwards and backwards.

All that look at a tap are one thing, places with an optional condition, judged beside the tap while a pass runs
and on the session's statistics where it is already recorded. The other catchpoints look at a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from lockstep.engine.taps.breaks import Break
from lockstep.workbench.debugger.errors import DebuggerError
from lockstep.workbench.debugger.stops.beginnings import Beginning, Wrong
from lockstep.workbench.debugger.stops.predicates import Value, holds

Sentinel = Literal["nan", "inf", "desync", "golden", "repetition", "eos", "error"]
SENTINELS: tuple[Sentinel, ...] = ("nan", "inf", "desync", "golden", "repetition", "eos", "error")
#: Sentinels that are conditions at every tap.
AT_TAPS = ("nan", "inf")


@dataclass(slots=True)
class Breakpoint:
    """One thing to stop at. `places` empty: a catchpoint that looks at whole steps."""

    id: int
    kind: Literal["break", "watch", "catch"]
    what: str  # location, glob and predicate, or sentinel, as the user wrote it
    places: frozenset[int] = frozenset()
    when: Any = None  # condition tree
    condition: str = ""  # as the user wrote it
    rank: int | None = None
    seq: int | None = None  # the sequence that a condition speaks of; None: the first of a pass
    temporary: bool = False
    enabled: bool = True
    ignore: int = 0
    hits: int = 0
    inputs: Mapping[int, Sequence[int]] = field(default_factory=dict)  # of a catchpoint's places; see `Break`
    reported: set[Beginning] = field(default_factory=set)  # what a catchpoint has come by
    commands: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """DAP's word for a stop here."""
        return {"break": "breakpoint", "watch": "data breakpoint", "catch": "exception"}[self.kind]

    @property
    def judged_on_statistics(self) -> bool:
        """Whether it has a condition on a recorded step's numbers; where a sentinel begins is known beside them."""
        return self.when is not None and (self.kind != "catch" or bool(self.condition))

    def message(self) -> Break:
        """What the ranks are given."""
        return Break(self.id, self.places, self.when, self.rank, self.inputs, self.seq)

    def describe(self) -> str:
        """ "breakpoint 1, layers.0.attn.*"."""
        return f"{'breakpoint' if self.kind == 'break' else self.kind} {self.id}, {self.what}"


@dataclass(frozen=True, slots=True)
class Hit:
    """Breakpoints that hit at one place, and the ranks on which they did."""

    place: int
    ids: tuple[int, ...]
    ranks: tuple[int, ...]


class Breakpoints:
    """All breakpoints of a debugger, by number from 1."""

    def __init__(self) -> None:
        self._by_id: dict[int, Breakpoint] = {}
        self._next = 1

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(self._by_id.values())

    def add(self, kind: Literal["break", "watch", "catch"], what: str, **details: Any) -> Breakpoint:
        """A new breakpoint with the next number."""
        made = Breakpoint(self._next, kind, what, **details)
        self._by_id[made.id] = made
        self._next += 1
        return made

    def get(self, id: int) -> Breakpoint:
        """A breakpoint by its number."""
        if id not in self._by_id:
            known = ", ".join(map(str, self._by_id)) or "none"
            raise DebuggerError(f"there is no breakpoint {id} (there is {known})")
        return self._by_id[id]

    def delete(self, id: int) -> None:
        """Forget a breakpoint; its number is not used again."""
        del self._by_id[self.get(id).id]

    def at_taps(self) -> list[Breakpoint]:
        """The enabled ones that look at taps."""
        return [one for one in self if one.enabled and one.places]

    def sentinels(self) -> dict[str, Breakpoint]:
        """The enabled catchpoints that look at whole steps, by sentinel."""
        return {one.what: one for one in self if one.enabled and one.kind == "catch" and not one.places}

    def count(self, ids: Sequence[int]) -> list[Breakpoint]:
        """Count a hit of each; those that are to stop there (the others are still being ignored)."""
        stopping = []
        for id in ids:
            one = self.get(id)
            one.hits += 1
            if one.ignore > 0:
                one.ignore -= 1
            else:
                stopping.append(one)
        for one in stopping:
            if one.temporary:
                self.delete(one.id)
        return stopping


def recorded_hits(
    candidates: Sequence[Breakpoint], names: Callable[[int | None], Mapping[str, Value] | None], taps: int, ranks: int,
    begun: Mapping[int, Wrong | None] = MappingProxyType({}),
) -> dict[int, Hit]:  # fmt: skip
    """Every place of a recorded step at which a breakpoint hits. Conditions need the step's statistics (`names` of a
    sequence); where there are none only unconditional breakpoints can hit. `begun`: where each catchpoint may."""
    found: dict[int, tuple[list[int], set[int]]] = {}
    for one in candidates:
        known = names(one.seq) if one.judged_on_statistics else {}
        if known is None:
            continue
        table = holds(one.when if one.judged_on_statistics else None, known, taps, ranks)
        if one.kind == "catch":
            begins = begun.get(one.id)
            table = table & begins if begins is not None else np.zeros_like(table)
        for place in map(int, np.flatnonzero(table.any(axis=1))):
            on = [int(r) for r in np.flatnonzero(table[place]) if one.rank in (None, int(r))]
            if on and place in one.places:
                ids, where = found.setdefault(place, ([], set()))
                ids.append(one.id)
                where.update(on)
    return {place: Hit(place, tuple(ids), tuple(sorted(where))) for place, (ids, where) in found.items()}
