"""What must never be, looked for in the whole session: where each first was, and how far was looked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.taps.names import local_name
from sessions import STATISTICS, Session, Tap
from workbench.debugger.stops.sentinels import repeated_phrase
from workbench.views.trail import Trail
from workbench.views.verdicts import Judged
from workbench.views.words import plural, said

_NAN, _INF = STATISTICS.index("nan"), STATISTICS.index("inf")


@dataclass(frozen=True, slots=True)
class Sentinel:
    """One thing that was looked for on one branch. `step` is where it first was (None: nowhere), `what` says what
    was found, `looked` how far was looked."""

    branch: int
    name: str
    step: int | None
    what: str
    looked: str
    tap: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """The steps of one branch that are looked at: those that it recorded itself."""

    session: Session
    trail: Trail
    branch: int
    steps: range
    budget: int

    def clean(self, name: str, looked: str) -> Sentinel:
        return Sentinel(self.branch, name, None, "", looked)

    def found(self, name: str, step: int, what: str, looked: str, tap: str = "") -> Sentinel:
        return Sentinel(self.branch, name, step, what, looked, tap)


def sentinels(
    session: Session, trail: Trail, branch: int, steps: range, seqs: Sequence[int], budget: int
) -> list[Sentinel]:
    """All of them, over `steps` of one branch. `budget`: statistics values (taps × ranks × steps) to be read."""
    place = _Place(session, trail, branch, steps, budget)
    whole = len(steps) * len(session.taps) * session.ranks <= budget
    return [
        _not_finite(place, "NaN", _NAN, whole),
        _not_finite(place, "Inf", _INF, whole),
        _desync(place),
        _misplaced(place),
        *(_repetition(place, seq, len(seqs) > 1) for seq in seqs),
    ]


def left_golden(first: Judged) -> Sentinel:
    """The first divergence as a sentinel."""
    what = f"{first.tap} is the first to leave the golden reference"
    return Sentinel(first.branch, "golden divergence", first.step, what, "every judged step", first.tap)


def _not_finite(place: _Place, name: str, column: int, whole: bool) -> Sentinel:
    session, branch, steps = place.session, place.branch, place.steps
    if whole:
        candidates: Iterable[int] = steps
        looked = f"every tap at {plural(len(steps), 'step')}"
    else:
        hit = [_first_in_series(place, tap.name, STATISTICS[column]) for tap in _streams(session)]
        candidates = sorted({step for step in hit if step is not None})[:1]
        looked = f"residual stream and logits at {plural(len(steps), 'step')}"
    seen = False
    for step in candidates:
        stats = session.stats(step, branch)
        if stats is None:
            continue
        seen = True
        bad = stats[:, :, column] > 0
        if bad.any():
            tap = session.taps[int(np.argmax(bad.any(axis=1)))]
            ranks = [int(rank) for rank in np.flatnonzero(bad[tap.index])]
            counts = ", ".join(f"rank {rank}: {int(stats[tap.index, rank, column])}" for rank in ranks[:8])
            return place.found(name, step, f"{said(tap.name)} ({counts})", looked, said(tap.name))
    if whole and not seen and len(steps):
        return place.clean(name, "no statistics were recorded")
    return place.clean(name, looked)


def _streams(session: Session) -> list[Tap]:
    """The taps that whatever goes wrong in a layer flows into."""
    wanted = ("mlp_residual", "final_norm", "logits")
    return [tap for tap in session.taps if local_name(tap.name) in wanted] or list(session.taps[-1:])


def _first_in_series(place: _Place, tap: str, statistic: str) -> int | None:
    first: list[int] = []
    for rank in range(place.session.ranks):
        steps, values = place.session.series(tap, statistic, rank, place.branch)
        hits = np.flatnonzero((values > 0) & (steps >= place.steps.start))
        if hits.size:
            first.append(int(steps[hits[0]]))
    return min(first, default=None)


def _desync(place: _Place) -> Sentinel:
    """Replicas must be the same bits: their checksums say so."""
    session, steps, name = place.session, place.steps, "rank desync"
    replicas = np.array([tap.index for tap in session.taps if tap.layout == "replicate"], np.intp)
    if session.ranks < 2 or not replicas.size:
        return place.clean(name, "there is one rank" if session.ranks < 2 else "no replicated taps")
    fits = max(16, place.budget // max(1, len(session.taps) * session.ranks))
    chosen = steps if len(steps) <= fits else [*steps[: fits // 2], *steps[-(fits // 2) :]]
    looked = f"replicated taps at {plural(len(chosen), 'step')}"
    looked += "" if len(chosen) == len(steps) else f" of {len(steps)} (first and last)"
    seen = False
    for step in chosen:
        sums = session.checksums(step, place.branch)
        if sums is None:
            continue
        seen = True
        differs = (sums[replicas] != sums[replicas, :1]).any(axis=1)
        if differs.any():
            tap = session.taps[int(replicas[int(np.argmax(differs))])]
            return place.found(name, step, _who(said(tap.name), sums[tap.index]), looked, said(tap.name))
    return place.clean(name, looked if seen or not len(steps) else "no checksums were recorded")


def _who(tap: str, sums: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> str:
    """Which ranks differ from the majority, or from rank 0 where there is none."""
    values, counts = np.unique(sums, return_counts=True)
    common = values[counts.argmax()] if counts.max() * 2 > len(sums) else sums[0]
    odd = [str(rank) for rank, value in enumerate(sums.tolist()) if value != common]
    return f"{tap}: rank {', '.join(odd[:16])} differs bit for bit"


def _misplaced(place: _Place) -> Sentinel:
    name, looked = "KV length ≠ position", f"every sequence and rank at {plural(len(place.steps), 'step')}"
    for odd in sorted(place.trail.misplaced, key=lambda one: one.step):
        if odd.step in place.steps and place.trail.owner(place.branch, odd.step) == odd.branch:
            return place.found(name, odd.step, odd.words, looked)
    return place.clean(name, looked)


def _repetition(place: _Place, seq: int, several: bool) -> Sentinel:
    name = f"repetition, sequence {seq}" if several else "repetition"
    looked = f"emitted tokens at {plural(len(place.steps), 'step')}"
    tokens: list[int] = []
    for step in range(place.steps.stop):  # what a parent said before counts
        token = place.trail.token(place.branch, step, seq)
        if token is None:
            continue
        tokens.append(token)
        length = repeated_phrase(tokens) if step in place.steps else 0
        if length:
            return place.found(name, step, _again(length), looked)
    return place.clean(name, looked)


def _again(length: int) -> str:
    return "one token over and over" if length == 1 else f"the same {length} tokens over and over"
