"""Each operation's share of the gap: what of it goes where that operation of one side errs as the other side's does.

An operation gives what the reference computes of its inputs, and an error of its own: a rounding, another weight, a
mistake. Its output is replaced by the other side's by giving it the other's error. All operations after it go on from
there, each with its own error as before, so that a share is that of the operation, and not of all that comes before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.engine.taps.names import layer_of
from lockstep.workbench.diagnosis.mismatch.gaps import TokenGap
from lockstep.workbench.diagnosis.mismatch.own_errors import (
    OwnErrors,
    Place,
    RowChanges,
    comparable_taps,
    differences,
)
from lockstep.workbench.diagnosis.mismatch.side import HIDDEN, Side, Values
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.row_sides import paired
from lockstep.workbench.diagnosis.search_time import SearchTime
from lockstep.workbench.words.plain_text import plural

#: Tokens that are looked at: those with the largest gaps.
_TOKENS = 64
_LOGITS = "logits"
#: Layers up to which each operation is asked for at once.
_LAYERS = 6
#: By tap, what is to be added to rows of one side.
Changes = Mapping[str, RowChanges]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two sides are apart: the mean |Δ log p| of the tokens, and the mean KL(rollout || trainer) of the whole
    distributions, in nats. Or shares of these that have gone, at most 1, below 0 where more is left than was there."""

    gap: float
    kl: float

    def gone(self, left: Distance) -> Distance:
        """The shares that have gone where `left` is left; NaN of nothing."""
        return Distance(_gone(self.gap, left.gap), _gone(self.kl, left.kl))


@dataclass(frozen=True, slots=True)
class GapShare:
    """`rollout`: what of the gap goes where the rollout's output of an operation is the trainer's; `trainer`: the other
    way round."""

    tap: str
    rollout: Distance
    trainer: Distance

    @property
    def size(self) -> float:
        """By what operations are put in order: the larger of both directions' shares of |Δ log p|."""
        return max(self.rollout.gap, self.trainer.gap)


@dataclass(frozen=True, slots=True)
class GapShares:
    """`shares`, the largest first, are of `whole`, over `tokens`. `note` states why there are none, or not of every
    operation."""

    shares: tuple[GapShare, ...] = ()
    whole: Distance = Distance(0.0, 0.0)
    tokens: int = 0
    note: str = ""


@dataclass(slots=True)
class _SideRun:
    """One side with what the reference gives for it. `logits` and `hidden` are of the tokens that are looked at."""

    side: Side
    errors: OwnErrors
    logits: dict[Place, Values] = field(default_factory=dict)
    hidden: dict[Place, Values] = field(default_factory=dict)
    recorded: set[Place] = field(default_factory=set)
    _head: dict[Place, Values] = field(default_factory=dict)

    def read(self, places: Sequence[Place]) -> None:
        """What is recorded of those tokens."""
        for seq in dict.fromkeys(seq for seq, _ in places):
            positions = [position for other, position in places if other == seq]
            self.recorded |= {(seq, position) for position in self.side.recorded_logits(seq, positions)}
            self.logits |= {(seq, at): row for at, row in self.side.logits_at(seq, positions).items()}
            rows = self.side.rows.rows(HIDDEN, "tensor", seq, positions)
            self.hidden |= {(seq, at): row.astype(np.float64).reshape(-1) for at, row in rows.items()}
        values = self.side.head(self.hidden)
        self._head = {} if values is None else dict(zip(self.hidden, values, strict=True))

    def own(self, tap: str) -> dict[Place, Values]:
        """The errors of an operation, by row."""
        if tap != _LOGITS:
            return self.errors.rows(tap)
        return {place: self.logits[place] - self._head[place] for place in self.recorded & self._head.keys()}

    def changed(self, changes: Changes) -> dict[Place, Values]:
        """The logits of the run in which that is added; those that can be known."""
        inside = {tap: rows for tap, rows in changes.items() if tap != _LOGITS}
        logits = dict(self.logits)
        if inside:
            after = self.errors.changed(inside, HIDDEN)
            there = {place: after[place] for place in self.hidden if place in after}
            values = self.side.head(there)
            moved = {} if values is None else dict(zip(there, values, strict=True))
            logits = {place: self.logits[place] + row - self._head[place] for place, row in moved.items()}
        for place, row in changes.get(_LOGITS, {}).items():
            if place in logits:
                logits[place] = logits[place] + row
        return logits


def gap_shares(ours: Side, theirs: Side, gaps: Sequence[TokenGap], time: SearchTime) -> GapShares:
    """Of a rollout and a trainer of one checkpoint that read the same tokens."""
    partners = {
        (seq, position): (other, position)
        for seq, other, positions in paired(ours.rows, theirs.rows)
        for position in positions
    }
    known = [one for one in gaps if (one.seq, one.position) in partners]
    chosen = sorted(known, key=lambda one: -abs(one.gap))[:_TOKENS]
    if not chosen:
        return GapShares(note="no token has a log-probability on both sides")
    if ours.facts is None:
        return GapShares(note="what operations should give is not known: --model CHECKPOINT has it")
    runs = _runs(ours, theirs, ours.facts.at("float64"))
    if HIDDEN not in runs[0].errors.names:
        return GapShares(note=f"{HIDDEN} cannot be computed of what both sides recorded")
    places = [(one.seq, one.position) for one in chosen]
    runs[0].read(places)
    runs[1].read([partners[place] for place in places])
    return _ShareSearch(runs, partners, {(one.seq, one.position): one.token for one in chosen}, time).shares()


def _runs(ours: Side, theirs: Side, facts: Facts) -> tuple[_SideRun, _SideRun]:
    """Both sides with the operations that can be computed of what either recorded."""
    a, b = (RecordedTaps(Recording(side.rows.session, side.rows.branch)) for side in (ours, theirs))
    names = comparable_taps(a, b)
    while True:
        first, second = OwnErrors(a, facts, names), OwnErrors(b, facts, names)
        both = [tap for tap in first.names if tap in second.names]
        if both == names:
            return _SideRun(ours, first), _SideRun(theirs, second)
        names = both


class _ShareSearch:
    """Two runs, `tokens` of which by the rollout's place the next token, and what of each operation differs."""

    def __init__(
        self,
        runs: tuple[_SideRun, _SideRun],
        partners: Mapping[Place, Place],
        tokens: Mapping[Place, int],
        time: SearchTime,
    ) -> None:
        self.runs, self.partners, self.time = runs, partners, time
        self.tokens = {place: token for place, token in tokens.items() if self._is_known(place, token)}
        back = {other: place for place, other in partners.items()}
        self.changes: tuple[dict[str, RowChanges], dict[str, RowChanges]] = {}, {}
        for tap in (*runs[0].errors.names, _LOGITS):
            own = [run.own(tap) for run in runs]
            if mine := differences(own[0], own[1], partners, tap):
                self.changes[0][tap] = mine
                self.changes[1][tap] = differences(own[1], own[0], back, tap)
        self.whole = self._distance(runs[0].logits, runs[1].logits)

    def _is_known(self, place: Place, token: int) -> bool:
        rows = self.runs[0].logits.get(place), self.runs[1].logits.get(self.partners[place])
        return all(row is not None and token < len(row) for row in rows)

    def shares(self) -> GapShares:
        """Of each operation, as long as there is time: those of the layers with the largest shares first."""
        if not self.changes[0] or self.whole.gap == 0:
            return GapShares((), self.whole, len(self.tokens))
        layers: dict[int | None, list[str]] = {}
        for tap in self.changes[0]:
            layers.setdefault(layer_of(tap), []).append(tap)
        groups, found = list(layers.values()), list[GapShare]()
        if len(groups) > _LAYERS:
            groups.sort(key=lambda taps: self._gone(0, taps).gap, reverse=True)
        asked = 0
        for taps in groups:
            if found and self.time.over:
                break
            found += [GapShare(tap, self._gone(0, [tap]), self._gone(1, [tap])) for tap in taps]
            asked += 1
        note = ""
        if asked < len(groups):
            note = (
                f"of {asked} of {plural(len(groups), 'layer')} alone, those with the largest shares: "
                f"{self.time.seconds:.2g} s did not suffice for all"
            )
        found.sort(key=lambda one: one.size, reverse=True)
        return GapShares(tuple(found), self.whole, len(self.tokens), note)

    def _gone(self, of: int, taps: Sequence[str]) -> Distance:
        """The shares that go where one side's outputs of `taps` are the other's."""
        logits = self.runs[of].changed(
            {tap: self.changes[of][tap] for tap in taps if tap in self.changes[of]}
        )
        sides = (logits, self.runs[1].logits) if of == 0 else (self.runs[0].logits, logits)
        return self.whole.gone(self._distance(*sides))

    def _distance(self, ours: Mapping[Place, Values], theirs: Mapping[Place, Values]) -> Distance:
        """Of the tokens that both have logits of."""
        gaps, divergences = [], []
        for place, token in self.tokens.items():
            if (mine := ours.get(place)) is None or (other := theirs.get(self.partners[place])) is None:
                continue
            p, q = (row - np.logaddexp.reduce(row) for row in (mine, other))
            gaps.append(abs(float(p[token] - q[token])))
            with np.errstate(all="ignore"):
                divergences.append(float(np.sum(np.where(np.exp(p) > 0, np.exp(p) * (p - q), 0.0))))
        return (
            Distance(float(np.mean(gaps)), float(np.mean(divergences)))
            if gaps
            else Distance(math.nan, math.nan)
        )


def _gone(whole: float, left: float) -> float:
    return 1 - left / whole if whole > 0 else math.nan
